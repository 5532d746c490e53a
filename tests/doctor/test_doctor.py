"""`demopt doctor`: facts of a machine, and the ways between machines."""

import errno
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
from torch._C import _distributed_c10d
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

import demopt.doctor as module
from demopt.doctor import Pair, doctor, examine, measure_pairs, slow_start
from demopt.train import team
from demopt.train.config import InputError
from forked import free_port

MACHINES = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]  # Linux answers at all of 127.0.0.0/8


def everywhere(machines, wait):
    """What each of these machines finds between MACHINES."""
    port = free_port()
    with ThreadPoolExecutor(len(machines)) as pool:
        return list(pool.map(lambda me: measure_pairs(me, MACHINES, port, wait), machines))


@pytest.fixture(autouse=True)
def _little_data(monkeypatch):
    monkeypatch.setattr(module, "BULK_SECONDS", 0.01)


def test_every_pair_is_measured_and_all_machines_are_told(monkeypatch, capsys):
    timeouts, passed = [], module._pass
    monkeypatch.setattr(module, "_pass", lambda pg, *how: [timeouts.append(pg.options._timeout), passed(pg, *how)])
    group = Mock(
        wraps=ProcessGroupGloo, _Options=ProcessGroupGloo._Options, create_device=ProcessGroupGloo.create_device
    )
    group.side_effect = lambda *given: [timeouts.append(given[-1]._timeout * 5), ProcessGroupGloo(*given)][1]
    monkeypatch.setattr(_distributed_c10d, "ProcessGroupGloo", group)
    first, *others = everywhere(MACHINES, wait=60)
    assert set(timeouts) == {timedelta(seconds=module.TURN_SECONDS)}
    assert capsys.readouterr().out.count("measuring 127.0.0.1 with 127.0.0.3 ...") == 3
    ways = [(one, other) for one in MACHINES for other in MACHINES if one != other]
    assert sorted((pair.source, pair.target) for pair in first) == ways
    for pair in first:
        assert (pair.fault, pair.unlike, pair.host) == ("", "", socket.gethostname())
        assert min(pair.rtt_ms, pair.bits_per_second) > 0
    assert all(rows == first for rows in others)


@pytest.mark.parametrize("absent", MACHINES)
def test_machine_that_does_not_answer_is_named(absent, monkeypatch):
    present = [machine for machine in MACHINES if machine != absent]

    class WhenAllCame(TCPStore):
        """Counts its second only once all present machines have come, however slow this computer is."""

        def wait(self, keys, timeout):
            if keys == MACHINES:
                super().wait(present, timeout)
                timeout = timedelta(seconds=1)
            super().wait(keys, timeout)

    monkeypatch.setattr(_distributed_c10d, "TCPStore", WhenAllCame)
    if absent == MACHINES[0]:
        wait, told, others = 1, "demopt doctor does not run there, or a firewall", {}
    else:
        wait, told, others = 100, "with --peers in this order", dict.fromkeys([(*present,), (*reversed(present),)], "")
    for me, rows in zip(present, everywhere(present, wait), strict=True):
        faults = {(pair.source, pair.target): pair.fault for pair in rows}
        assert told in faults.pop((me, absent))
        assert faults == others


@pytest.mark.parametrize("elsewhere", ["", "gloo listens on 172.17.0.1 on 127.0.0.3: export ..."])
def test_pair_that_cannot_connect_is_named_with_the_machine_that_listens_elsewhere(monkeypatch, elsewhere):
    class Group(ProcessGroupGloo):
        def __init__(self, store, *rest):
            key, real = store
            if key == f"{MACHINES[1]}-{MACHINES[2]}":
                raise RuntimeError("Connect timeout\nframes")
            super().__init__(PrefixStore(key, real), *rest)

    monkeypatch.setattr(_distributed_c10d, "PrefixStore", lambda key, store: (key, store))
    monkeypatch.setattr(_distributed_c10d, "ProcessGroupGloo", Group)
    monkeypatch.setattr(module, "_listening", lambda me: (me, elsewhere if me == MACHINES[2] else ""))
    told = elsewhere or "allow all TCP between them (Connect timeout)"
    for rows in everywhere(MACHINES, wait=60):
        faults = [(pair.source, pair.target, pair.fault) for pair in rows if pair.fault]
        assert (len(rows), faults) == (5, [(*MACHINES[1:], f"gloo does not connect them; {told}")])


@pytest.mark.parametrize("number", [errno.ENETUNREACH, errno.EHOSTUNREACH])
def test_machine_without_a_route_is_not_waited_for(monkeypatch, number):
    no_route = Mock(side_effect=OSError(number, os.strerror(number)))
    monkeypatch.setattr(module.socket, "create_connection", no_route)
    monkeypatch.setattr(module.time, "sleep", lambda _: pytest.fail("waited"))
    (row,) = measure_pairs(MACHINES[1], MACHINES, free_port(), wait=1e6)
    assert os.strerror(number) in row.fault


def test_raw_lines_of_torch_are_not_shown(capfd):
    with module.quiet():
        os.write(2, b"[W socket.cpp] The hostname of the client socket cannot be retrieved")
    os.write(2, b"shown")
    assert capfd.readouterr().err == "shown"


def named(monkeypatch, address, own="10.1.2.3"):
    """Imitates a machine whose host name resolves to an address of its own, or to none."""
    monkeypatch.delenv(team.INTERFACE, raising=False)
    monkeypatch.setattr(team, "own_addresses", lambda _: [address] if address else [])
    monkeypatch.setattr(team, "addresses", lambda: [("lo", "127.0.0.1"), ("eth7", own)])


@pytest.mark.parametrize("address", ["127.0.1.1", "::1", None], ids=["as Debian has it", "IPv6", "no address"])
def test_loopback_trap_is_found_with_its_remedy(address, monkeypatch, capsys):
    named(monkeypatch, address)
    monkeypatch.setattr(team, "local_address", lambda _: "10.1.2.3")
    with pytest.raises(InputError, match=r"cannot reach .*: export GLOO_SOCKET_IFNAME=eth7 on this machine"):
        team.refuse_loopback("10.1.2.4")
    assert doctor(port=free_port()) == 1
    assert "-> export GLOO_SOCKET_IFNAME=eth7" in capsys.readouterr().out


def resolved(monkeypatch, *addresses):
    """Makes each host name resolve to these addresses, in this order."""
    look_up = socket.getaddrinfo

    def given(host, *more, **how):
        if "." in host or ":" in host:
            return look_up(host, *more, **how)
        return [row for each in addresses for row in look_up(each, *more, **how)]

    monkeypatch.setattr(team.socket, "getaddrinfo", given)


def test_gloo_takes_the_first_address_of_the_host_name_that_this_machine_has(monkeypatch):
    monkeypatch.delenv(team.INTERFACE, raising=False)
    monkeypatch.setattr(team.socket, "gethostname", lambda: "home")
    resolved(monkeypatch, "2001:db8::1", "::1", "198.51.100.1", "127.0.0.1")
    assert (team.gloo_address()[0], team.address_of("home")) == ("::1", "198.51.100.1")
    resolved(monkeypatch, "198.51.100.1")
    assert team.gloo_address() == ("127.0.0.1", "the host name home stands for no address of this machine")


def test_interface_without_ipv4_has_its_ipv6_address_of_the_network(monkeypatch, tmp_path):
    (tmp_path / "if_inet6").write_text(
        "fe800000000000000000000000000001 02 40 20 80     eth9\n"
        "fd720001000000000000000000000002 02 40 00 80     eth9\n"
        "fd720001000000000000000000000003 01 40 00 80       lo\n"
    )
    monkeypatch.setattr(team, "_IPV6", tmp_path / "if_inet6")
    assert [each for each in team.addresses() if each[0] in ("lo", "eth9")] == [
        *(("lo", "127.0.0.1"), ("eth9", "fd72:1::2"), ("lo", "fd72:1::3"))
    ]
    assert team.listen_on("fd72:1::3") == f"export {team.INTERFACE}=lo", "also where it has an IPv4 address"
    monkeypatch.setenv(team.INTERFACE, "eth9")
    team.refuse_loopback("fd72:2::2")
    assert (team.gloo_address()[0], team.listen_on("fd72:1::2")) == ("fd72:1::2", f"export {team.INTERFACE}=eth9")


def test_machine_has_an_ipv6_address_on_the_way_to_one():
    assert (team.local_address("::1"), module.own_address(["::1", "2001:db8::1"])) == ("::1", "::1")


@pytest.mark.parametrize("way", ["10.1.2.3", "172.17.0.1", ""], ids=["another", "the same", "unknown"])
def test_failed_run_names_the_interface_if_gloo_listens_elsewhere(way, monkeypatch):
    named(monkeypatch, "172.17.0.1")
    monkeypatch.setattr(team, "local_address", lambda _: way)
    told = team._obstacle("10.0.0.9")
    assert ("the way to 10.0.0.9 is from 10.1.2.3: export GLOO_SOCKET_IFNAME=eth7 here" in told) == (way == "10.1.2.3")
    assert "demopt doctor --peers ..." in told


def test_failed_run_blames_no_interface_that_has_both_addresses(monkeypatch):
    monkeypatch.setattr(team, "addresses", lambda: [("eth7", "10.1.2.3"), ("eth7", "2001:db8::3")])
    monkeypatch.setattr(team, "gloo_address", lambda: ("10.1.2.3", "the host name stands for it"))
    monkeypatch.setattr(team, "local_address", lambda _: "2001:db8::3")
    assert team._obstacle("2001:db8::9") == "demopt doctor --peers ... on all machines finds the obstacle"
    assert team.listen_on("2001:db8::3") == f"export {team.INTERFACE}=eth7"


def test_real_address_is_well_and_unknown_interface_is_not(monkeypatch):
    named(monkeypatch, "10.1.2.3")
    team.refuse_loopback("10.1.2.4")
    monkeypatch.setenv(team.INTERFACE, "nowhere0")
    with pytest.raises(InputError, match="GLOO_SOCKET_IFNAME is nowhere0; this machine has"):
        team.gloo_address()


def test_machine_whose_system_tells_no_interfaces_finds_itself_and_trusts_the_one_that_is_named(monkeypatch):
    monkeypatch.setattr(team, "addresses", list)  # as on macOS
    assert module.own_address(["192.0.2.1", "127.0.0.1"]) == "127.0.0.1"
    monkeypatch.setenv(team.INTERFACE, "en0")
    team.refuse_loopback("10.1.2.4")
    assert module._listening("127.0.0.1") == ("127.0.0.1", "")


def test_slow_link_has_a_bandwidth():
    shown = {rate: module._finding(Pair("a", "b", "host", 1.0, rate))[1] for rate in (3e5, 8e8, 1.29e9)}
    assert [each.rpartition(", ")[2] for each in shown.values()] == ["300 kbit/s", "800 Mbit/s", "1.29 Gbit/s"]


def test_slow_start_matters_on_long_links_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_IDLE", tmp_path / "idle")
    for setting, rtt_ms, remedy in (("1\n", 0.5, ""), ("1\n", 50, "sysctl -w net.ipv4.tcp_slow"), ("0\n", 50, "")):
        (tmp_path / "idle").write_text(setting)
        assert slow_start(rtt_ms)[2].partition("_start")[0] == remedy


def test_taken_port_and_missing_kernels_are_found(monkeypatch):
    monkeypatch.setattr("demopt.kernels.gate.library", lambda: None)
    with socket.create_server(("", 0)) as taken:
        number = taken.getsockname()[1]
        found = {name: (what, remedy) for name, what, remedy in examine("10.0.0.1", number, alone=True)}
    assert found[f"port {number}"][1].startswith("stop the listening program")
    assert found["CPU kernels"][0].startswith("none, so steps are slower")


@pytest.mark.parametrize("address", ["127.0.1.1", "10.0.0.1", "172.17.0.1"], ids=["loopback", "the peers'", "another"])
def test_gloo_listens_where_peers_reach_it(address, monkeypatch):
    named(monkeypatch, address, own="10.0.0.1")
    elsewhere = "gloo listens on 172.17.0.1 on 10.0.0.1: export GLOO_SOCKET_IFNAME=eth7 there"
    expected = (address, elsewhere) if address == "172.17.0.1" else ("10.0.0.1", "")
    assert module._listening("10.0.0.1") == expected


BOTH = ("10.0.0.1", "10.0.0.2"), ("10.0.0.2", "10.0.0.1")
SLOWEST = "--workers 2 --bandwidth 90.00Mbit --latency 50.00\n"
FAST = [Pair(*BOTH[0], "b", 1.0, 1.2e10), Pair(*BOTH[1], "a", 1.0, 1.3e10)]
UNLIKE = [Pair(*BOTH[0], "b", 50.0, 1e8, unlike="torch 2.12.0"), Pair(*BOTH[1], "a", 40.0, 9e7)]


@pytest.mark.parametrize(
    ("own", "ways", "told"),
    [
        ("127.0.1.1", FAST, ["--bandwidth 12.0Gbit"]),  # a known fault is told once, and the links are measured
        ("10.0.0.1", UNLIKE, ["it has torch 2.12.0: install the same version there", SLOWEST]),
        ("10.0.0.1", None, ["the links are measured when the port is free"]),  # ends where the first machine's is taken
    ],
    ids=["known fault", "unlike", "taken port"],
)
def test_doctor_tells_faults_and_the_plan_to_make(own, ways, told, monkeypatch, capsys):
    named(monkeypatch, own)
    monkeypatch.setattr(module, "_IDLE", Path("none"))  # not this machine's setting
    monkeypatch.setattr(module, "own_address", lambda peers: peers[0])
    monkeypatch.setattr(module, "measure_pairs", lambda *_: ways or pytest.fail("measured"))
    with socket.create_server(("", 0)) as taken:
        assert doctor(peers=[*BOTH[0]], port=free_port() if ways else taken.getsockname()[1]) == 1
    shown = capsys.readouterr().out
    assert all(text in shown for text in told)
    assert shown.count("FIX ") == 1
