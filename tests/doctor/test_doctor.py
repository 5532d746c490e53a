"""`demopt doctor`: facts of a machine, and the ways between machines."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, ProcessGroupGloo

from demopt.doctor import command, peers
from demopt.doctor.command import doctor, examine, slow_start
from demopt.doctor.peers import Pair, measure_pairs
from demopt.train import team
from demopt.train.config import InputError
from forked import free_port

MACHINES = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]  # Linux answers at all of 127.0.0.0/8


def everywhere(machines: list[str], wait: float) -> list[list[Pair]]:
    """What each of these machines finds between MACHINES."""
    port = free_port()
    with ThreadPoolExecutor(len(machines)) as pool:
        return list(pool.map(lambda me: measure_pairs(me, MACHINES, port, wait), machines))


@pytest.fixture(autouse=True)
def _little_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "BULK_SECONDS", 0.01)


def test_every_pair_is_measured_and_all_machines_are_told() -> None:
    first, *others = everywhere(MACHINES, wait=60)
    ways = [(one, other) for one in MACHINES for other in MACHINES if one != other]
    assert sorted((pair.source, pair.target) for pair in first) == ways
    for pair in first:
        assert (pair.fault, pair.unlike, pair.host) == ("", "", socket.gethostname())
        assert pair.rtt_ms > 0
        assert pair.bits_per_second > 0
    assert all(rows == first for rows in others)


@pytest.mark.parametrize("absent", MACHINES)
def test_machine_that_does_not_answer_is_named(absent: str) -> None:
    present = [machine for machine in MACHINES if machine != absent]
    for me, rows in zip(present, everywhere(present, wait=1), strict=True):
        faults = {(pair.source, pair.target): pair.fault for pair in rows}
        if absent == MACHINES[0]:
            assert "demopt doctor does not run there, or a firewall" in faults.pop((me, absent))
            assert not faults
        else:
            assert "it did not come" in faults.pop((me, absent))
            assert faults == {(present[0], present[1]): "", (present[1], present[0]): ""}


def test_pair_that_cannot_connect_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def group(named: tuple[str, Any], *rest: Any) -> Any:
        key, store = named
        if key == f"{MACHINES[1]}-{MACHINES[2]}":
            raise RuntimeError("Connect timeout\nframes")
        return ProcessGroupGloo(PrefixStore(key, store), *rest)

    monkeypatch.setattr(peers, "PrefixStore", lambda key, store: (key, store))
    monkeypatch.setattr(peers, "ProcessGroupGloo", group)
    for rows in everywhere(MACHINES, wait=60):
        faults = {(pair.source, pair.target): pair.fault for pair in rows if pair.fault}
        told = "gloo does not connect them; allow all TCP between them (Connect timeout)"
        assert faults == {(MACHINES[1], MACHINES[2]): told}
        assert len(rows) == 5


# One machine


def named(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    """As on a machine whose name stands for an address."""

    def look_up(host: str) -> str:
        if address is None:
            raise socket.gaierror("unknown")
        return address

    monkeypatch.delenv(team.INTERFACE, raising=False)
    monkeypatch.setattr(team.socket, "gethostbyname", look_up)


@pytest.mark.parametrize("address", ["127.0.1.1", None], ids=["as Debian writes it", "a name without address"])
def test_loopback_trap_is_found_with_its_remedy(
    address: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named(monkeypatch, address)
    monkeypatch.setattr(team, "interfaces", lambda: {"lo": "127.0.0.1", "eth7": "10.1.2.3"})
    monkeypatch.setattr(team, "local_address", lambda _: "10.1.2.3")
    with pytest.raises(InputError, match=r"cannot reach .*: export GLOO_SOCKET_IFNAME=eth7 on this machine"):
        team.refuse_loopback("10.1.2.4")
    assert doctor(port=free_port()) == 1
    assert "-> export GLOO_SOCKET_IFNAME=eth7" in capsys.readouterr().out


def test_real_address_is_well_and_unknown_interface_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "10.1.2.3")
    team.refuse_loopback("10.1.2.4")
    monkeypatch.setenv(team.INTERFACE, "nowhere0")
    with pytest.raises(InputError, match="GLOO_SOCKET_IFNAME is nowhere0, and this machine has"):
        team.gloo_address()


def test_slow_start_matters_on_long_links_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_IDLE", tmp_path / "idle")
    for setting, rtt_ms, remedy in (("1\n", 0.5, ""), ("1\n", 50, "sysctl -w net.ipv4.tcp_slow"), ("0\n", 50, "")):
        (tmp_path / "idle").write_text(setting)
        assert slow_start(rtt_ms)[2].startswith(remedy)
        assert bool(slow_start(rtt_ms)[2]) == bool(remedy)


def test_taken_port_and_missing_kernels_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("demopt.kernels.loader.library", lambda: None)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        number = taken.getsockname()[1]
        found = {name: (what, remedy) for name, what, remedy in examine("10.0.0.1", number, alone=True)}
    assert found[f"port {number}"][1].startswith("stop the listening program")
    assert found["CPU kernels"][0].startswith("none, so steps are slower")


# The command


def test_single_address_of_another_machine_is_refused() -> None:
    with pytest.raises(InputError, match=r"--peers 10.255.255.1: wanted exactly one address of this machine"):
        doctor(peers=["10.255.255.1"], port=free_port())


def test_links_are_not_measured_from_an_address_that_others_cannot_reach(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named(monkeypatch, "127.0.1.1")
    monkeypatch.setattr(peers, "own_address", lambda peers: peers[0])
    monkeypatch.setattr(peers, "measure_pairs", lambda *_: pytest.fail("measured"))
    assert doctor(peers=["10.0.0.1", "10.0.0.2"], port=free_port()) == 1
    assert "links are measured when this is fixed" in capsys.readouterr().out


def test_doctor_shows_unlike_versions_and_the_plan_to_make_for_the_slowest_pair(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named(monkeypatch, "10.0.0.1")
    one = Pair("10.0.0.1", "10.0.0.2", "b", 50.0, 1e8, unlike="torch 2.12.0")
    monkeypatch.setattr(peers, "own_address", lambda peers: peers[0])
    monkeypatch.setattr(peers, "measure_pairs", lambda *_: [one, Pair("10.0.0.2", "10.0.0.1", "a", 40.0, 9e7)])
    assert doctor(peers=["10.0.0.1", "10.0.0.2"], port=free_port()) == 1
    told = capsys.readouterr().out
    assert "it has torch 2.12.0: install the same version there" in told
    assert "--workers 2 --bandwidth 90000kbit --latency 50.00\n" in told
