"""The four calls on each kind of store; races, keys, addresses."""

import itertools
import os
import re
import signal
import threading
from unittest.mock import Mock

import pytest
import servers
import stores
from servers import small_s3

from demopt import FolderExchange
from demopt.errors import ExchangeError, MessageError
from demopt.runs.key import Keyed, read_key
from demopt.runs.store import ObjectStore, Patient, StoreError, open_store

KEY = bytes(range(32))


def test_four_calls_do_what_they_promise(any_store):
    assert any_store.get("rounds/1/a", most=9) is None
    puts = ("a", b"uno"), ("b.c", b"first"), ("b.c", b"second")
    assert [any_store.put_if_absent(f"rounds/1/{name}", data) for name, data in puts] == [True, True, False]
    assert (any_store.get("rounds/1/a", most=3), any_store.get("rounds/1/b.c", most=5)) == (b"uno", b"first")
    assert any_store.list("rounds/1") == {"a", "b.c"}
    assert any_store.list("nothing") == set()
    any_store.delete(["rounds/1/a", "rounds/1/never"])
    assert any_store.list("rounds/1") == {"b.c"}


def test_object_longer_than_expected_is_not_read_nor_waited_for(any_store):
    stores.put(any_store, "a", bytes(100))
    patient = Patient(stores.Through(any_store), 60.0, pytest.fail)
    with pytest.raises(MessageError, match="a has 100 bytes, and at most 99 were expected"):
        patient.get("a", most=99)
    assert patient.inner.calls == ["get"]


@pytest.mark.parametrize(("kind", "races"), [("memory", 200), ("folder", 200), ("s3", 12), ("azure", 12)])
def test_of_racing_puts_one_wins_and_its_bytes_are_whole(kind, races, tmp_path, monkeypatch):
    """Eight threads at a time, with messages of a few bytes and of a few hundred thousand."""
    store = stores.make(kind, tmp_path, monkeypatch)
    stores.race(store, racers=8, races=races, size=lambda number: 9 if number % 3 else 300_000)


def test_handler_of_a_signal_runs_while_a_request_lasts(monkeypatch):
    came, found = threading.Event(), []

    def answers_late(*_):
        os.kill(os.getpid(), signal.SIGUSR1)
        found.append(came.wait(60))

    before = signal.signal(signal.SIGUSR1, lambda *_: came.set())
    with small_s3(monkeypatch, answers_late):
        assert Patient(open_store("s3://bucket/run"), 0.0, pytest.fail).get("a", most=9) is None
    signal.signal(signal.SIGUSR1, before)
    assert found == [True]


def test_long_uploads_wait_longer_for_the_server(monkeypatch):
    opened = []

    def patient(seconds):
        opened.append(seconds)
        return bare._store

    bare = ObjectStore()
    store = ObjectStore(bare._store, patient=patient)
    for length in (10_000, 320_000, 321_000, 3_200_000):
        stores.put(store, "a", bytes(length))
    assert opened == [20, 160]  # for the second and third, and for the last
    with monkeypatch.context() as patch:
        patch.setattr("obstore.put", Mock(side_effect=TimeoutError))
        for step in (0, 3600, 3600):  # refused at once, which does not count, then after hours
            patch.setattr("demopt.runs.store.time.monotonic", Mock(side_effect=itertools.count(step=step)))
            with pytest.raises(StoreError):
                store.put_if_absent("b", bytes(321_000))
    assert store.put_if_absent("b", bytes(321_000))
    assert opened == [20, 160, 40, 80], "each attempt that took too long may take twice as long"


def test_keyed_store_refuses_what_was_changed_moved_or_written_without_the_key():
    bare = ObjectStore()
    keyed = Keyed(bare, KEY)
    stores.put(keyed, "rounds/1/a.message", b"message")
    assert keyed.list("rounds/1") == {"a.message"}
    whole = bare.get(keyed._place("rounds/1/a.message"), most=99)
    assert whole.endswith(b"message"), "which anybody can read"
    for name, data in (
        ("changed", whole[:-1] + b"x"),
        ("rounds/2/a.message", whole),
        ("bare", b"message"),
        ("short", whole[:5]),
        ("empty", b""),
        ("another", Keyed(bare, bytes(32))._tag("another", b"message") + b"message"),
    ):
        stores.put(bare, keyed._place(name), data)
        told = f"{name} was not written with this run's key; give the run's own --key-file, or none"
        with pytest.raises(MessageError, match=told):
            keyed.get(name, most=99)


def test_key_files(tmp_path):
    (tmp_path / "key").write_text("no key")
    with pytest.raises(ValueError, match="wanted 64 hexadecimal digits"):
        read_key(tmp_path / "key")
    with pytest.raises(ValueError, match="openssl rand -hex 32"):
        read_key(tmp_path / "none")
    with pytest.raises(ValueError, match="the key is not of 32 bytes"):
        Keyed(ObjectStore(), "a" * 32)


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("ftp://host/run", "begins with s3://, gs:// or az://, or is a path.* is 'ftp://host/run'"),
        ("https://example.org/dav/run", "begins with s3://"),  # WebDAV has no put if absent
        *((address, "begins with s3://") for address in ("https:/example.org/run", "host:/srv/run", "me@host:run")),
        *(
            (address, "begins with s3://")
            for address in ("s3//bucket/run", " s3://bucket/run", "\u2018S3;//bucket/run")
        ),
        ("s3://", "names no bucket; wanted s3://BUCKET/NAME"),
        *((f"s3:{rest}", "names no bucket") for rest in ("///run", "bucket/run", "/bucket/run", "//me:x@bucket/run")),
        ("s3://bucket/a//b", "in each part of a name, not ''"),
        # Other clients take the rest for a fragment, a query or a blank.
        *((f"s3://bucket/{name}", f"not '{re.escape(name)}'") for name in ("..", "run#1", "run?x=1", "a%20b")),
        *((address, "three slashes") for address in ("file://host/run", "file:run")),
        *((address, "is a path or s3://") for address in ("", " ", "run\nother")),
        *((f"file:///{'x' * 300}" if each else "x" * 300, "is no path here: .* File name too long") for each in (0, 1)),
        *((address, "is no path here") for address in ("~no-such-user/run", "file:///a%00b")),
        (f"{__file__}/run", "cannot be opened"),
    ],
)
def test_addresses_that_are_none_are_refused(address, told):
    with pytest.raises(ValueError, match=told):
        open_store(address)


@pytest.mark.parametrize("address", [None, 5])
def test_address_of_another_type_is_refused_by_name(address):
    """None is the value of an environment variable that is not set."""
    with pytest.raises(TypeError, match=f"address is {address}; give a path, or s3://bucket/name"):
        FolderExchange(address)


def test_address_of_a_folder_is_what_the_user_wrote(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for address, place in {
        "~/run": "home/run", "run/": "run", "./a/../b": "b", "file:///{}/c%20d": "c d", "FILE://{}/e": "e",
        "odd #?%20\u00e9[*]": "odd #?%20\u00e9[*]", "s3": "s3", "a:b": "a:b", "./s3//c": "s3/c", "s3/d": "s3/d",
    }.items():  # fmt: skip
        store = open_store(address.format(tmp_path))
        assert store.put_if_absent("run", place.encode())
        assert (tmp_path / place / "run").read_text() == place
        monkeypatch.chdir("/")  # a relative address belongs to the folder where it was opened
        assert store.get("run", most=99) == place.encode()
        monkeypatch.chdir(tmp_path)


def test_address_of_a_bucket_is_what_the_user_wrote(monkeypatch):
    with small_s3(monkeypatch) as objects:
        for address, key in {
            "s3://bucket/run/": "run/a", "S3://bucket/a.b/c+d=e@f_g": "a.b/c+d=e@f_g/a", "s3://bucket": "a",
        }.items():  # fmt: skip
            store = open_store(address)
            assert store.put_if_absent("a", b"x")
            assert key in objects
            assert store.list("nothing") == set()
        monkeypatch.setenv("AWS_ENDPOINT_URL", os.environ["AWS_ENDPOINT_URL"] + "/")
        assert open_store("s3://bucket/run").get("a", most=9) == b"x"


@pytest.mark.parametrize("endpoint", ["localhost:9000", "ftp://x", "http://"])
def test_endpoint_that_is_none_is_named(endpoint, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(ValueError, match=f"AWS_ENDPOINT_URL is '{endpoint}'; wanted http://HOST:PORT"):
        open_store("s3://bucket/run")


@pytest.mark.parametrize("value", ["key\r", "key\n", " key", "k\x07ey"])
@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "AZURE_STORAGE_ACCOUNT"])
def test_credential_with_the_end_of_a_line_is_named_where_it_is_used(name, value, monkeypatch):
    used, other = ("s3", "az") if name.startswith("AWS") else ("az", "s3")
    for each in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_ACCOUNT"):
        monkeypatch.setenv(each, "x")
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name} begins or ends with a space or has unprintable letters"):
        open_store(f"{used}://bucket/run")
    open_store(f"{other}://bucket/run")


def test_azure_takes_the_names_of_its_own_command_and_says_which_are_missing(monkeypatch):
    given = servers.environment("azure", monkeypatch)
    for there, name in (("ACCOUNT_NAME", "ACCOUNT"), ("ACCOUNT_KEY", "KEY")):
        monkeypatch.delenv(f"AZURE_STORAGE_{there}")
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", given[f"AZURE_STORAGE_{there}"])
    store = open_store(f"{servers.BUCKETS['azure'][1]}/names")
    assert store.put_if_absent("a", b"x") or store.get("a", most=9) == b"x"
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT")
    with pytest.raises(ValueError, match=r"no credentials: .* AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY"):
        open_store("az://bucket/run")


@pytest.mark.parametrize("half", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_half_of_the_credentials_is_none(half, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(half, "x")
    with pytest.raises(ValueError, match="no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        open_store("s3://bucket/run")


@pytest.mark.parametrize("address", ["s3://nowhere/run", "az://nowhere/run"])
def test_missing_bucket_is_named(address, monkeypatch):
    servers.environment("azure" if address.startswith("az") else "s3", monkeypatch)
    store = Patient(open_store(address), patience=1e9, say=pytest.fail)
    with pytest.raises(ExchangeError, match=f"{address}: no such bucket or folder; create it, or correct the name"):
        store.get("a", most=9)
