"""Machines in network namespaces: links carry what they say, cuts cut, and nothing is left behind. Takes root."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from laboratory.network import __main__ as command
from laboratory.network import machines
from laboratory.network.machines import Link, MissingError, bring_up
from laboratory.network.race import _mean_step, steps_to
from laboratory.network.scenario import Event, Scenario, ScenarioError, read, run

SCENARIOS = sorted((Path(machines.__file__).parent / "scenarios").glob("*.toml"))
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

# Which machines answer: with a refusal, where a silent network gives none.
REACH = """
import socket
for number in (1, 2, 3):
    try:
        socket.create_connection((f"10.77.0.{number}", 9), 10)
    except ConnectionRefusedError:
        print("True", end=" ")
    except OSError:
        print("False", end=" ")
"""


@pytest.fixture(scope="module")
def root() -> None:
    """Skips where machines cannot be made."""
    try:
        with bring_up(1):
            pass
    except MissingError as error:
        pytest.skip(f"no machines here: they need {error}")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no tomllib")
@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_scenario_file_can_be_read(path: Path) -> None:
    found = read(path)
    assert found.links
    assert all(link.name for link in found.links)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no tomllib")
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("machines = 2", "command is empty"),
        ("machines = 0\ncommand = ['true']", "machines is 0"),
        ("machines = 2\ncommand = ['true']\nlinks = [{ rate = 'fast' }]", "rate is 'fast'"),
        ("machines = 2\ncommand = ['true']\nlinks = [{ speed = 'fast' }]", "unknown 'speed'"),
        ("machines = 2\ncommand = ['true']\nevents = [{ do = 'burn', machine = 0 }]", "an event does 'burn'"),
        ("machines = 2\ncommand = ['true']\nevents = [{ do = 'kill', machine = 2 }]", "machine 2 of 2"),
        ("machines =", "Invalid value"),
    ],
)
def test_mistakes_in_a_scenario_are_named(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ScenarioError, match=named):
        read(tmp_path / "mine.toml")


def test_without_root_the_command_says_so_and_ends(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["network", str(SCENARIOS[0])])
    command.main()
    assert capsys.readouterr().out.startswith("no machines here: they need ")


@pytest.mark.usefixtures("root")
def test_a_message_cannot_hide_in_the_burst_of_a_link() -> None:
    links = (Link("2mbit"), Link("2mbit", rtt_ms=40))
    results = run(Scenario(2, ("{python}", "-c", TALK), links, limit_seconds=60.0))
    for result, least in zip(results, (0.0, 0.04), strict=True):
        assert float(result["answers"][1]["output"][0]) >= 0.95 * (8 * MESSAGE / 2e6) + least
        assert result["sent_bytes"][1] > MESSAGE
        assert result["received_bytes"][0] >= MESSAGE


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("way", ["in", "out"])
def test_a_cut_machine_gets_no_answer_until_mended(way: str) -> None:
    with bring_up(2) as network:
        address = network.machines[0].address

        def reaches() -> bool:
            code = f"import socket; socket.create_connection(('{address}', 29700), 0.5)"
            words = network.command(network.machines[1], [sys.executable, "-c", code])
            return subprocess.run(words, capture_output=True, check=False).returncode == 0

        serve = f"import socket; s = socket.create_server(('{address}', 29700)); print(1, flush=True); input()"
        words = network.command(network.machines[0], [sys.executable, "-c", serve])
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            server.stdout.readline()
            assert reaches()
            network.cut(1, way)
            assert not reaches()
            network.mend(1)
            assert reaches()
            server.kill()


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("hub", [False, True])
def test_machines_of_a_hub_reach_the_first_one_alone(hub: bool) -> None:
    (result,) = run(Scenario(3, ("{python}", "-c", REACH), hub=hub))
    reached = [[word == "True" for word in answer["output"][-1].split()] for answer in result["answers"]]
    assert reached == [[True, True, True], [True, True, not hub], [True, not hub, True]]


@pytest.mark.usefixtures("root")
def test_each_machine_has_a_name_a_disk_and_the_addresses_of_all() -> None:
    code = "import os, socket; open('{disk}/' + socket.gethostname(), 'w'); print(*os.listdir('{disk}'))"
    code += "; print(*map(socket.gethostbyname, ('m0', 'm1')))"
    (result,) = run(Scenario(2, ("{python}", "-c", code)))
    addresses = "10.77.0.1 10.77.0.2"
    assert [answer["output"] for answer in result["answers"]] == [["m0", addresses], ["m1", addresses]]
    assert [answer["exit"] for answer in result["answers"]] == [0, 0]


@pytest.mark.usefixtures("root")
def test_an_event_waits_for_a_line_of_a_machine() -> None:
    code = "import signal; print('here', flush=True); signal.pause()"
    kills = tuple(Event("kill", machine, after="here", on=1) for machine in (0, 1))
    (result,) = run(Scenario(2, ("{python}", "-c", code), events=kills))
    assert [answer["exit"] for answer in result["answers"]] == [-signal.SIGKILL] * 2
    assert not result["late"]


@pytest.mark.usefixtures("root")
def test_machines_of_a_killed_process_are_swept_away() -> None:
    code = "from laboratory.network.machines import bring_up\nwith bring_up(1):\n    print(1, flush=True)\n    input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()

    def left() -> list[str]:
        told = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        return [word for word in told.split() if word.startswith(f"{machines.PREFIX}{process.pid}")]

    assert left()
    machines.sweep()
    assert not left()


def test_steps_to_a_loss_lie_between_the_points_of_a_curve() -> None:
    curve = [(0, 5.0), (10, 3.0), (20, 2.0)]
    assert [steps_to(curve, loss) for loss in (3.0, 2.5, 2.0, 1.9)] == [10.0, 15.0, 20.0, None]


def test_a_short_round_stands_for_a_long_one() -> None:
    ranks = [[1.0, 1.0, 3.0], [2.0, 2.0, 3.5]]  # seconds of steps, the last one with the exchange
    assert _mean_step(ranks, every=3, shortened=False) == 7.5 / 3
    assert _mean_step(ranks, every=11, shortened=True) == (10 * 2.0 + 3.5) / 11
