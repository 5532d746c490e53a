"""demopt doctor: what it finds on a machine, and between machines."""

import socket
import socketserver
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from demopt import cli
from demopt.doctor import machine, peers
from demopt.doctor.command import doctor
from demopt.doctor.peers import Pair, Round
from demopt.train import preflight
from demopt.train.config import InputError


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def three_machines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """127.0.0.1 to 127.0.0.3 as machines: Linux answers at all of 127.0.0.0/8."""

    class Server(peers._Server):
        def __init__(self, where: tuple[str, int], handler: Any) -> None:
            super().__init__((threading.current_thread().name, where[1]), handler)

    monkeypatch.setattr(peers, "_Server", Server)
    monkeypatch.setattr(peers, "interfaces", lambda: {"lo": threading.current_thread().name})
    monkeypatch.setattr(peers, "BULK_SECONDS", 0.02)
    return ["127.0.0.1", "127.0.0.2", "127.0.0.3"]


def _everywhere(machines: list[str], at: list[str], wait: float) -> list[list[Pair]]:
    port = free_port()

    def one(address: str) -> list[Pair]:
        threading.current_thread().name = address
        return Round(machines, port, wait).run()

    with ThreadPoolExecutor(len(at)) as pool:
        return list(pool.map(one, at))


def test_doctor_measures_every_pair_and_tells_all(three_machines: list[str]) -> None:
    first, *others = _everywhere(three_machines, three_machines, wait=30)
    assert {(pair.source, pair.target) for pair in first} == {
        (one, other) for one in three_machines for other in three_machines if one != other
    }
    for pair in first:
        assert not pair.fault
        assert not pair.unlike
        assert pair.host == socket.gethostname()
        assert 0 < pair.rtt_ms < 10_000
        assert pair.bits_per_second > 1e5
        assert abs(pair.clock_seconds) < 1
    assert all(rows == first for rows in others)


def test_doctor_names_a_machine_that_does_not_answer(three_machines: list[str]) -> None:
    rows = _everywhere(three_machines, three_machines[:2], wait=2)[0]
    faults = {(pair.source, pair.target): pair.fault for pair in rows}
    assert faults["127.0.0.1", "127.0.0.2"] == faults["127.0.0.2", "127.0.0.1"] == ""
    for source in three_machines[:2]:
        assert "demopt doctor does not run there, or a firewall" in faults[source, "127.0.0.3"]


@pytest.mark.parametrize(("me", "told"), [("127.0.0.1", [("127.0.0.3", False)]), ("127.0.0.3", [("127.0.0.1", True)])])
def test_doctor_hands_its_rows_past_a_machine_that_has_gone(
    three_machines: list[str], monkeypatch: pytest.MonkeyPatch, me: str, told: list[tuple[str, bool]]
) -> None:
    reached: list[tuple[str, bool]] = []

    def ask(peer: str, port: int, question: dict[str, Any]) -> None:
        if peer == "127.0.0.2":
            raise ConnectionRefusedError
        reached.append((peer, question["done"]))

    monkeypatch.setattr(peers, "_ask", ask)
    monkeypatch.setattr(threading.current_thread(), "name", me)
    Round(three_machines, free_port(), 1.0)._hand_on([], {})
    assert reached == told


def test_doctor_says_when_something_else_answers(three_machines: list[str]) -> None:
    class Stranger(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(b"HTTP/1.1 400 Bad Request\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.2", 0), Stranger) as stranger:
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        with pytest.raises(OSError, match="is not demopt doctor"):
            peers._ask("127.0.0.2", stranger.server_address[1], {"kind": "hello"})
        stranger.shutdown()


def test_doctor_refuses_a_list_without_this_machine() -> None:
    with pytest.raises(InputError, match="wanted exactly one address of this machine"):
        Round(["198.51.100.1", "198.51.100.2"], free_port(), wait=1)


# The loopback trap


def _named(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    """As on a machine whose name stands for an address."""

    def look_up(host: str) -> str:
        if address is None:
            raise socket.gaierror("unknown")
        return address

    monkeypatch.delenv(preflight.VARIABLE, raising=False)
    monkeypatch.setattr(preflight.socket, "gethostbyname", look_up)


@pytest.mark.parametrize("address", ["127.0.1.1", None], ids=["as Debian writes it", "a name without address"])
def test_loopback_trap_is_found_with_its_cure(
    address: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _named(monkeypatch, address)
    monkeypatch.setattr(preflight, "way_to", lambda _: ("eth7", "10.1.2.3"))
    with pytest.raises(InputError, match=r"cannot reach .*: export GLOO_SOCKET_IFNAME=eth7 on this machine"):
        preflight.refuse_loopback("10.1.2.4")
    assert doctor(port=free_port()) == 1
    assert "-> export GLOO_SOCKET_IFNAME=eth7" in capsys.readouterr().out


def test_real_address_or_named_interface_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    _named(monkeypatch, "10.1.2.3")
    preflight.refuse_loopback("10.1.2.4")
    monkeypatch.setenv(preflight.VARIABLE, "nowhere0")
    with pytest.raises(InputError, match="GLOO_SOCKET_IFNAME is nowhere0, and this machine has"):
        preflight.gloo_address()


def test_slow_start_is_a_fault_on_long_links_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "idle").write_text("1\n")
    monkeypatch.setattr(machine, "_IDLE", tmp_path / "idle")
    assert machine.after_pause(rtt_ms=0.5).well
    assert "tcp_slow_start_after_idle=0" in machine.after_pause(rtt_ms=50).cure
    (tmp_path / "idle").write_text("0\n")
    assert machine.after_pause(rtt_ms=50).well


def test_taken_port_is_a_fault() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        found = {finding.what: finding for finding in machine.examine("10.0.0.1", taken.getsockname()[1], alone=True)}
    (port,) = [finding for name, finding in found.items() if name.startswith("port")]
    assert not port.well


def test_unlike_versions_are_to_be_mended(
    three_machines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from demopt.doctor import command

    command._show_pairs([Pair("10.0.0.1", "10.0.0.2", "b", "eth0", 1.0, 1e8, 0.0, unlike="torch 2.12.0")])
    assert "it has torch 2.12.0: install the same there" in capsys.readouterr().out


def test_doctor_of_a_run_to_come_costs_a_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [Pair("10.0.0.1", "10.0.0.2", "b", "eth0", 50.0, 1e8), Pair("10.0.0.2", "10.0.0.1", "a", "eth0", 40.0, 9e7)]
    monkeypatch.setattr("demopt.doctor.command.Round", lambda *_: type("R", (), {"run": lambda _: pairs})())
    doctor(peers=["10.0.0.1", "10.0.0.2"], port=free_port(), preset="tiny")
    assert "slowest pair (90 Mbit/s, 50.0 ms), model tiny" in capsys.readouterr().out


def test_doctor_is_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["demopt", "doctor", "--port", "0"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "--port is 0, wanted 1 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize(("library", "says"), [(None, "none, so steps are slower"), (object(), "compiled")])
def test_doctor_says_whether_there_are_kernels(library: object, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("demopt.kernels.compiled.compiled", lambda: library)
    (found,) = [f for f in machine.examine("10.0.0.1", free_port(), alone=True) if f.what == "CPU kernels"]
    assert found.found.startswith(says)
    assert found.well
