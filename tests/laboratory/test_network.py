"""Machines in network namespaces: links are as slow as they say, and nothing is left behind. Needs root."""

import subprocess
import sys

import pytest

from laboratory.network import machines
from laboratory.network.machines import Link, MissingError, bring_up
from laboratory.network.scenario import Scenario, run

pytestmark = pytest.mark.usefixtures("root")

MESSAGE = 60_000  # bytes; at 2 Mbit/s they take a quarter of a second, of which a burst (4 kB) may hide a fifteenth

# Machine 0 accepts a connection on each link; machine 1 times a message and its one-byte answer.
TALK = f"""
import os, socket, sys, time
rank, address = os.environ["RANK"], (os.environ["MASTER_ADDR"], 29700)
for link in sys.stdin:
    began = time.perf_counter()
    if rank == "0":
        with socket.create_server(address) as server:
            wire, _ = server.accept()
        left = {MESSAGE}
        while left:
            left -= len(wire.recv(left))
        wire.sendall(b"!")
    else:
        for tries in range(100):
            try:
                wire = socket.create_connection(address, 5)
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        began = time.perf_counter()
        wire.sendall(bytes({MESSAGE}))
        wire.recv(1)
    print(time.perf_counter() - began, flush=True)
"""

# Prints this machine's name, and those of machines that answer: by a refusal, which a silent network does not give.
REACH = """
import json, socket, sys
sys.stdin.readline()
found = [socket.gethostname()]
for name in ("m0", "m1", "m2"):
    try:
        socket.create_connection((name, 9), 10)
    except ConnectionRefusedError:
        found.append(name)
    except OSError:
        pass
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def root():
    """Skips where machines cannot be made."""
    try:
        with bring_up(1):
            pass
    except MissingError as error:
        pytest.skip(f"no machines here: they need {error}")


def test_a_message_cannot_hide_in_the_burst_of_a_link():
    links = (Link("2mbit"), Link("2mbit", rtt_ms=40))
    results = run(Scenario(2, (sys.executable, "-c", TALK), links, limit_seconds=60.0))
    for result, least in zip(results, (0.0, 0.04), strict=True):
        assert result["answers"][1] >= 0.95 * (8 * MESSAGE / 2e6) + least
        assert result["sent_bytes"][1] > MESSAGE
        assert result["received_bytes"][0] >= MESSAGE


def test_machines_know_and_reach_each_other_by_name():
    (result,) = run(Scenario(3, (sys.executable, "-c", REACH)))
    names = ["m0", "m1", "m2"]
    assert result["answers"] == [[name, *names] for name in names]


def test_machines_of_a_killed_process_are_swept_away():
    code = "from laboratory.network.machines import bring_up\nwith bring_up(1):\n    print(1, flush=True)\n    input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as process:
        process.stdout.readline()
        process.kill()

    def left():
        told = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        return [word for word in told.split() if word.startswith(f"{machines.PREFIX}{process.pid}")]

    assert left()
    machines.sweep()
    assert not left()
