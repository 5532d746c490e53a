"""Machines in network namespaces: links carry what they say, cuts cut, and nothing is left behind. Takes root."""

import subprocess
import sys

import pytest

from laboratory.network import machines
from laboratory.network.machines import Link, MissingError, bring_up
from laboratory.network.scenario import Cut, Scenario, run

pytestmark = pytest.mark.usefixtures("root")

MESSAGE = 60_000  # bytes; at 2 Mbit/s they take a quarter of a second, of which a burst may hide a fiftieth

# Machine 0 takes one connection; machine 1 times a message and its one byte of answer.
TALK = f"""
import os, socket, time
rank, address = os.environ["RANK"], (os.environ["MASTER_ADDR"], 29700)
if rank == "0":
    wire, _ = socket.create_server(address).accept()
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
    print(time.perf_counter() - began)
"""

# This machine's name, and those that answer: with a refusal, where a silent network gives none.
REACH = """
import socket
print(socket.gethostname())
for name in ("m0", "m1", "m2"):
    try:
        socket.create_connection((name, 9), 10)
    except ConnectionRefusedError:
        print(name)
    except OSError:
        pass
"""

# Whether machine 0 answers; once it does not, until it does again.
WATCH = """
import os, socket, time
def answers():
    try:
        socket.create_connection((os.environ["MASTER_ADDR"], 9), 1)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
if os.environ["RANK"] == "1":
    for wanted in (True, False, True):
        while answers() != wanted:
            time.sleep(0.1)
        print(wanted, flush=True)
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
    results = run(Scenario(2, ("{python}", "-c", TALK), links, limit_seconds=60.0))
    for result, least in zip(results, (0.0, 0.04), strict=True):
        assert float(result["answers"][1]["output"][0]) >= 0.95 * (8 * MESSAGE / 2e6) + least
        assert result["sent_bytes"][1] > MESSAGE
        assert result["received_bytes"][0] >= MESSAGE


def test_a_cut_machine_gives_no_answer_until_mended():
    (result,) = run(Scenario(2, ("{python}", "-c", WATCH), limit_seconds=60.0, cut=Cut("True", 3.0)))
    assert [answer["output"] for answer in result["answers"]] == [[], ["True", "False", "True"]]
    assert [answer["exit"] for answer in result["answers"]] == [0, 0]
    assert not result["late"]


@pytest.mark.parametrize("hub", [False, True])
def test_machines_know_each_other_by_name_and_those_of_a_hub_reach_the_first_one_alone(hub):
    (result,) = run(Scenario(3, ("{python}", "-c", REACH), hub=hub))
    names = ["m0", "m1", "m2"]
    reached = [names, ["m0", "m1"], ["m0", "m2"]] if hub else 3 * [names]
    outputs = [answer["output"] for answer in result["answers"]]
    assert outputs == [[name, *others] for name, others in zip(names, reached, strict=True)]


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
