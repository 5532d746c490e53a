"""The throughput of a link, between machines 0 and 1, by plain TCP: one rank of a scenario with stages."""

import json
import os
import socket
import statistics
import struct
import sys
import time

PORT = 29600
PIECE = bytes(1 << 16)


def main() -> None:
    rank = int(os.environ["RANK"])
    for number, line in enumerate(sys.stdin):
        stage = json.loads(line)
        seconds, pings = stage.get("seconds", 2.0), stage.get("pings", 20)
        for sender in range(2):  # a connection for each: TCP's knowledge of one link is wrong for the next
            with _connect(rank, PORT + 2 * number + sender) as wire:
                trips = _pings(wire, rank, pings)
                if rank == sender:
                    _send(wire, seconds)
                else:
                    megabits = _receive(wire)
        print(json.dumps({"rtt_ms": trips, "megabits": megabits}), flush=True)


def _connect(rank: int, port: int) -> socket.socket:
    address = os.environ["MASTER_ADDR"], port
    if rank == 0:
        with socket.create_server(address) as server:
            wire, _ = server.accept()
    else:
        wire = _retried(address)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return wire


def _retried(address: tuple[str, int]) -> socket.socket:
    for _ in range(100):
        try:
            return socket.create_connection(address, 10)
        except ConnectionRefusedError:
            time.sleep(0.1)  # the other machine has not started yet
    raise SystemExit("the other machine does not answer")


def _pings(wire: socket.socket, rank: int, count: int) -> float | None:
    """Returns the median round trip of a byte, in milliseconds; None on the machine that answers."""
    trips = []
    for _ in range(count):
        if rank == 1:
            wire.sendall(_exactly(wire, 1))
            continue
        began = time.perf_counter()
        wire.sendall(b"p")
        _exactly(wire, 1)
        trips.append(time.perf_counter() - began)
    return round(1e3 * statistics.median(trips), 3) if trips else None


def _send(wire: socket.socket, seconds: float) -> None:
    """Sends for some seconds, then say that this was all."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        wire.sendall(struct.pack("<I", len(PIECE)) + PIECE)
    wire.sendall(struct.pack("<I", 0))
    _exactly(wire, 1)


def _receive(wire: socket.socket) -> float:
    """Returns the megabits a second that arrived in the last six tenths of the time, past burst and slow start."""
    began = time.perf_counter()
    times = []
    while size := struct.unpack("<I", _exactly(wire, 4))[0]:
        _exactly(wire, size)
        times.append(time.perf_counter() - began)
    wire.sendall(b"e")
    late = [at for at in times if at > 0.4 * times[-1]]
    return round(8e-6 * (len(PIECE) + 4) * (len(late) - 1) / (late[-1] - late[0]), 3)


def _exactly(wire: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        piece = wire.recv(count - len(found))
        if not piece:
            raise SystemExit("the other machine is gone")
        found += piece
    return bytes(found)


if __name__ == "__main__":
    main()
