"""The laboratory of benchmarks/lab: links carry what they say, cuts cut, and nothing is left behind. Takes root."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "lab"
SCENARIOS = sorted((FOLDER / "scenarios").glob("*.toml"))
MESSAGE = 60_000  # bytes; at 2 Mbit/s they take a quarter of a second, of which a burst may hide a fiftieth

# Machine 0 takes connections; machine 1 times a message and its one byte of answer, or says that none came.
TALK = f"""
import os, socket, sys, time
rank, address = os.environ["RANK"], (os.environ["MASTER_ADDR"], 29700)
if rank == "0":
    server = socket.create_server(address)
    server.settimeout(float(sys.argv[1]))
    print("listening", flush=True)
    try:
        while True:
            wire, _ = server.accept()
            left = {MESSAGE}
            while left:
                left -= len(wire.recv(left))
            wire.sendall(b"!")
            wire.close()
    except TimeoutError:
        sys.exit()
for tries in range(100):
    try:
        wire = socket.create_connection(address, float(sys.argv[1]))
    except ConnectionRefusedError:
        time.sleep(0.05)
    except TimeoutError:
        sys.exit("no answer")
    else:
        break
wire.settimeout(float(sys.argv[1]))
for _ in range(2):
    began = time.perf_counter()
    wire.sendall(bytes({MESSAGE}))
    try:
        wire.recv(1)
    except TimeoutError:
        sys.exit("no answer")
    print("took", time.perf_counter() - began, flush=True)
    wire.close()
    break
"""


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The modules of the laboratory, which is a folder of programs and no package."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import network
    import scenario

    import lab

    class Modules:
        pass

    found: Any = Modules()
    found.lab, found.network, found.scenario = lab, network, scenario
    yield found
    for name in ("lab", "network", "scenario"):
        sys.modules.pop(name, None)


@pytest.fixture
def rooted(modules: Any) -> Any:
    """The modules, where machines can be made."""
    try:
        with modules.network.laboratory(1):
            pass
    except modules.network.MissingError as error:
        pytest.skip(f"no laboratory here: it needs {error}")
    return modules


def talk(modules: Any, seconds: float = 5.0, **more: Any) -> list[Any]:
    """Run TALK between two machines; the results by link."""
    command = ("{python}", "-c", TALK, str(seconds))
    return modules.lab.run(modules.scenario.Scenario("talk", 2, command, limit_seconds=60.0, **more))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_scenario_file_can_be_read(modules: Any, path: Path) -> None:
    found = modules.scenario.read(path)
    assert found.name == path.stem
    assert all(link.name for link in found.links)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("machines = 2", "command is empty"),
        ("machines = 0\ncommand = ['true']", "machines is 0"),
        ("machines = 2\ncommand = ['true']\nlinks = [{ rate = 'fast' }]", "rate is 'fast', wanted a number of"),
        ("machines = 2\ncommand = ['true']\nlinks = [{ speed = 'fast' }]", "unknown 'speed', wanted one of rate"),
        ("machines = 2\ncommand = ['true']\nhosts = 'bsd'", "hosts is 'bsd'"),
        ("machines = 2\ncommand = ['true']\nevents = [{ do = 'burn', machine = 0 }]", "an event does 'burn'"),
        ("machines = 2\ncommand = ['true']\nevents = [{ do = 'kill', machine = 2 }]", "machine 2 of 2"),
        ("machines =", "Invalid value"),
    ],
)
def test_mistakes_in_a_scenario_are_named(modules: Any, tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(modules.scenario.ScenarioError, match=told):
        modules.scenario.read(tmp_path / "mine.toml")


def test_without_root_the_laboratory_says_so_and_ends(
    modules: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["lab.py", str(SCENARIOS[0])])
    modules.lab.main()
    told = capsys.readouterr().out
    assert told.startswith("no laboratory here: it needs ")
    assert told.endswith("Nothing was run.\n")


def test_a_message_cannot_hide_in_the_burst_of_a_link(rooted: Any) -> None:
    slow, far = rooted.network.Link("2mbit"), rooted.network.Link("2mbit", rtt_ms=40)
    results = talk(rooted, seconds=1.0, links=(slow, far))
    for result, least in zip(results, (0.0, 0.04), strict=True):
        took = float(result["answers"][1]["output"][0].split()[1])
        assert took >= 0.95 * (8 * MESSAGE / 2e6) + least
        sent = result["sent_bytes"][1]
        assert sent > MESSAGE
        assert result["received_bytes"][0] >= MESSAGE


@pytest.mark.parametrize("way", ["in", "out"])
def test_a_cut_machine_gets_no_answer_until_mended(rooted: Any, way: str) -> None:
    network = rooted.network
    with network.laboratory(2) as lab:

        def reaches() -> bool:
            words = ["import socket", f"s = socket.create_connection(('{lab.machines[0].address}', 29700), 0.5)"]
            command = lab.command(lab.machines[1], [sys.executable, "-c", "; ".join(words)])
            return subprocess.run(command, capture_output=True, check=False).returncode == 0

        serve = f"import socket; s = socket.create_server(('{lab.machines[0].address}', 29700)); print(1, flush=True)"
        command = lab.command(lab.machines[0], [sys.executable, "-c", f"{serve}; input()"])
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            server.stdout.readline()
            assert reaches()
            lab.cut(1, way)
            assert not reaches()
            lab.mend(1)
            assert reaches()
            server.kill()


def test_each_machine_has_its_own_name_and_disk(rooted: Any) -> None:
    code = "import os, socket; open('{disk}/' + socket.gethostname(), 'w'); print(*os.listdir('{disk}'))"
    scenario = rooted.scenario.Scenario("names", 2, ("{python}", "-c", code))
    (result,) = rooted.lab.run(scenario)
    assert [answer["output"] for answer in result["answers"]] == [["m0"], ["m1"]]
    assert [answer["exit"] for answer in result["answers"]] == [0, 0]


@pytest.mark.parametrize(
    ("hosts", "addresses"),
    [("real", ["10.77.0.1", "10.77.0.2"]), ("debian", ["127.0.1.1", "10.77.0.2"]), ("none", ["-", "-"])],
)
def test_machines_find_the_names_that_the_scenario_gives_them(rooted: Any, hosts: str, addresses: list[str]) -> None:
    code = """
import socket
for name in ("m0", "m1"):
    try:
        print(socket.gethostbyname(name))
    except OSError:
        print("-")
"""
    scenario = rooted.scenario.Scenario("names", 2, ("{python}", "-c", code), hosts=hosts)
    (result,) = rooted.lab.run(scenario)
    assert result["answers"][0]["output"] == addresses


def test_an_event_waits_for_what_a_machine_prints(rooted: Any) -> None:
    code = "import os, sys; print('here', flush=True); sys.stdin.close(); import signal; signal.pause()"
    kills = tuple(rooted.scenario.Event("kill", machine, after="here", on=1) for machine in (0, 1))
    (result,) = rooted.lab.run(rooted.scenario.Scenario("kill", 2, ("{python}", "-c", code), events=kills))
    assert [answer["exit"] for answer in result["answers"]] == [-signal.SIGKILL] * 2
    assert not result["late"]


def test_a_killed_laboratory_is_swept_away(rooted: Any, tmp_path: Path) -> None:
    file = tmp_path / "waits.toml"
    code = "print({}, flush=True); import time; time.sleep(1000)"
    told = f"machines = 1\nstages = true\ncommand = ['{sys.executable}', '-c', '''{code}''']\n"
    file.write_text(told + "links = [{ rate = '1mbit', rtt_ms = 5 }, {}]")
    words = [sys.executable, "-u", str(FOLDER / "lab.py"), str(file), "--out", str(tmp_path / "x")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while not _pids(process.pid):
            assert process.poll() is None
        process.kill()
    assert _spaces(process.pid)
    rooted.network.sweep()
    assert not _spaces(process.pid)


def _spaces(pid: int) -> list[str]:
    told = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [word for word in told.split() if word.startswith(f"demoptlab{pid}")]


def _pids(pid: int) -> list[str]:
    told = [
        subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
        for name in _spaces(pid)
        if name.endswith("m0")
    ]
    return "".join(told).split()


def test_results_are_json(rooted: Any, tmp_path: Path) -> None:
    file = tmp_path / "true.toml"
    file.write_text("machines = 1\ncommand = ['true']")
    out = tmp_path / "results.json"
    subprocess.run([sys.executable, str(FOLDER / "lab.py"), str(file), "--out", str(out)], check=True)
    (result,) = json.loads(out.read_text())["results"]
    assert (result["link"], result["answers"][0]["exit"]) == ("no limit", 0)
