"""An S3 server in memory whose answers a test may replace: put (If-None-Match), get, head and list."""

import email.utils
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from laboratory import seaweed

Answer = tuple[int, str]  # status and body; or a status below 0: that answer after the request was done


def error(code: str, message: str = "told by the server") -> str:
    """The body of an error, with the line's end in it that AWS sends."""
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
        self.send_header("ETag", f'"{hashlib.md5(text).hexdigest()}"')
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
    """Sets what names the server to S3 clients; yields its objects by key. `rule(method, key)` replaces an answer."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.objects, server.rule, server.lock = {}, rule, threading.Lock()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in seaweed.environment("127.0.0.1", server.server_address[1]).items():
        monkeypatch.setenv(name, value)
    yield server.objects
    server.shutdown()
    server.server_close()
