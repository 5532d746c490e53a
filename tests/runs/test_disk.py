"""A run in a folder that others can write, and whose disk comes and goes: nothing outside it is touched."""

import contextlib
import os
import shutil
import stat
import time
import tracemalloc

import pytest
import stores

import forked
from demopt.errors import ExchangeError, MessageError
from demopt.runs import disk
from demopt.runs.disk import Disk
from demopt.runs.failures import StoreError
from demopt.runs.key import Keyed

pytestmark = pytest.mark.skipif(os.name == "nt", reason="makes links and FIFOs")
MESSAGE = "rounds/00000001/w-1.message"
KEY = bytes(32)
CHANGES_USERS = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="changes users")


@pytest.fixture(params=["descriptors", "paths"])
def run(request, tmp_path, monkeypatch):
    """A run's folder, opened by descriptors, then by paths, for systems that open nothing relative to a descriptor."""
    monkeypatch.setattr(disk, "_BY_DESCRIPTOR", request.param == "descriptors")
    return Disk(tmp_path / "run")


@pytest.fixture
def home(tmp_path):
    """Somebody's files, outside the run."""
    (tmp_path / "home" / "00000001").mkdir(parents=True)
    for name in ("thesis.message", "00000001/w-1.message", "manifest"):
        (tmp_path / "home" / name).write_text("precious")
    return tmp_path / "home"


def content(folder):
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_memory_for_an_object_is_that_of_its_bytes_and_not_of_the_most(run):
    run.put_if_absent(MESSAGE, b"mine")
    tracemalloc.start()
    try:
        assert run.get(MESSAGE, 1 << 28) == b"mine"
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("level", "target"), [("rounds", "."), ("rounds/00000001", "00000001"), (MESSAGE, "thesis.message")]
)
def test_link_at_any_level_is_not_followed(level, target, run, home, tmp_path):
    """Nothing outside is read, listed, deleted or written, and the run goes on."""
    before, place = content(home), tmp_path / "run" / level
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(home / target)
    assert run.list("rounds/00000001") == set()
    if level == MESSAGE:
        with pytest.raises(MessageError, match=f"{MESSAGE} is no file"):
            run.get(MESSAGE, 99)
        assert not run.put_if_absent(MESSAGE, b"mine")
    else:
        assert run.get(MESSAGE, 99) is None
    run.delete([MESSAGE])
    assert run.put_if_absent(MESSAGE, b"mine")
    assert run.get(MESSAGE, 99) == b"mine"
    assert content(home) == before


def test_folder_is_listed_without_links_folders_pipes_and_empty_files(run, home, tmp_path):
    run.put_if_absent("rounds/1/a", b"x")
    place = tmp_path / "run" / "rounds" / "1"
    (place / "link").symlink_to(home / "manifest")
    (place / "folder" / "in").mkdir(parents=True)
    os.mkfifo(place / "pipe")
    (place / "empty").touch()
    assert run.list("rounds/1") == {"a"}


def test_listing_has_what_stays_although_another_deletes_beside_it(run, tmp_path, monkeypatch):
    for name in "ab":
        run.put_if_absent(f"rounds/1/{name}", b"x")
    scandir = os.scandir

    @contextlib.contextmanager
    def deletes(place):
        with scandir(place) as found:
            entries = sorted(found, key=lambda each: each.name)
        (tmp_path / "run" / "rounds" / "1" / "a").unlink()
        yield entries

    monkeypatch.setattr(os, "scandir", deletes)
    assert run.list("rounds/1") == {"b"}


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_pipe_or_folder_in_the_place_of_an_object_is_no_object_and_nothing_hangs(make, run, tmp_path):
    make(tmp_path / "run" / "b")
    with pytest.raises(MessageError, match="b is no file"):
        run.get("b", 99)
    assert not run.put_if_absent("b", b"x")
    run.delete(["b"])


def test_file_in_the_place_of_a_folder_gives_way(run, tmp_path):
    (tmp_path / "run" / "rounds").write_text("in the way")
    assert run.list("rounds/1") == set()
    assert run.put_if_absent("rounds/1/a", b"x")


def test_object_that_a_loss_of_power_left_empty_is_absent_and_one_of_those_who_race_writes_it(run, tmp_path):
    (tmp_path / "run" / "rounds").mkdir()
    for number in range(50):
        (tmp_path / "run" / "rounds" / str(number)).touch()
        assert run.get(f"rounds/{number}", 9) is None
    stores.race(run, racers=3, races=50, size=lambda _: 9)
    run.delete(["rounds/7"])
    assert run.get("rounds/7", 9) is None
    assert not [*(tmp_path / "run" / "rounds").glob("7*")]


def test_object_that_is_empty_under_both_names_is_damaged_and_with_a_key_a_strangers(run, tmp_path):
    (tmp_path / "run" / "rounds").mkdir()
    for name in ("a", "a~"):
        (tmp_path / "run" / "rounds" / name).touch()
    assert not run.put_if_absent("rounds/a", b"x")
    with pytest.raises(MessageError, match="rounds/a is empty, and so is its second name"):
        run.get("rounds/a", 9)
    keyed = Keyed(run, bytes(32))
    assert keyed.put_if_absent("rounds/a", b"x")
    assert (keyed.get("rounds/a", 9), keyed.list("rounds")) == (b"x", {"a"})


def test_record_under_its_second_name_is_that_of_a_folder_that_is_mounted_again(run, tmp_path):
    place = tmp_path / "run"
    (place / "run").touch()
    assert run.put_if_absent("run", b"this run")
    place.rename(tmp_path / "away")
    shutil.copytree(tmp_path / "away", place)
    assert run.get("run", 9) == b"this run"


def test_record_of_a_keyed_run_is_there_after_a_stranger_has_filled_an_empty_file_of_its_name(run, tmp_path):
    place, keyed = tmp_path / "run", Keyed(run, KEY)
    (place / "run").touch()
    assert keyed.put_if_absent("run", b"record")
    (place / "run").write_bytes(b"x")
    assert keyed.get("run", 9) == Keyed(Disk(place), KEY).read("run", 9, bytes) == b"record"
    shutil.copytree(place, tmp_path / "other")
    place.rename(tmp_path / "away")
    (tmp_path / "other").rename(place)  # mounted again
    assert keyed.get("run", 9) == b"record"
    next(place.glob("run~?*")).write_bytes(b"another run")
    shutil.copytree(place, tmp_path / "other")
    shutil.rmtree(place)
    (tmp_path / "other").rename(place)
    with pytest.raises(StoreError, match="another folder is in its place"):
        keyed.get("run", 9)


def test_file_is_on_the_disk_before_it_has_its_name_and_its_folder_after(tmp_path, monkeypatch):
    """In the order that survives a loss of power at any moment."""
    did, fsync, link = [], os.fsync, os.link

    def noted_fsync(file):
        did.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file")
        fsync(file)

    def noted_link(*given, **how):
        did.append("link")
        link(*given, **how)

    run = Disk(tmp_path / "run")
    run.put_if_absent("rounds/first", b"x")  # makes folders
    monkeypatch.setattr(disk.os, "fsync", noted_fsync)
    monkeypatch.setattr(disk.os, "link", noted_link)
    run.put_if_absent("rounds/manifest", b"x")
    assert did == ["file", "link", "folder"]


def test_folder_that_is_gone_or_another_is_not_written_and_comes_back(run, tmp_path):
    """An unmounted or moved disk is waited for, and never made anew."""
    place, away = tmp_path / "run", tmp_path / "away"
    run.put_if_absent("run", b"this run")
    place.rename(away)
    for call, *given in ((run.get, "a", 9), (run.put_if_absent, "a", b"x"), (run.list, "."), (run.delete, ["a"])):
        with pytest.raises(StoreError, match=r"the folder of the run is gone; is its disk mounted\? \(No such file"):
            call(*given)
    assert not place.exists()
    place.mkdir()  # an empty mount point
    with pytest.raises(StoreError, match=r"is its disk mounted\? \(another folder is in its place"):
        run.put_if_absent("a", b"x")
    (place / "run").write_text("another run")
    with pytest.raises(StoreError, match="another folder"):
        run.get("a", 9)
    assert content(place) == {"run": b"another run"}
    shutil.rmtree(place)
    shutil.copytree(away, place)  # mounted again: other numbers, the same run
    assert run.put_if_absent("a", b"x")
    assert run.get("a", 9) == b"x"


@pytest.mark.parametrize("wrong", [0, -1e6, 1e6])
def test_what_a_killed_process_left_is_deleted_after_a_day(wrong, tmp_path, monkeypatch):
    """By the disk's clock: this machine's may be wrong."""
    monkeypatch.setattr(time, "time", lambda right=time.time: right() + wrong)
    Disk(tmp_path / "run").put_if_absent("a", b"x")
    for name, age in (("old", 90_000), ("new", 0)):
        left = tmp_path / "run" / ".partial" / name
        left.touch()
        os.utime(left, (left.stat().st_mtime - age,) * 2)
    Disk(tmp_path / "run").put_if_absent("b", b"x")
    assert os.listdir(tmp_path / "run" / ".partial") == ["new"]


def test_new_folders_have_the_mode_of_the_runs_own(tmp_path):
    """So several users can share a run: chmod 3770 lets each delete only its own files."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o3770)
    Disk(tmp_path / "run").put_if_absent("rounds/1/a", b"x")
    for folder in ("rounds", "rounds/1", ".partial"):
        assert stat.S_IMODE((tmp_path / "run" / folder).stat().st_mode) == 0o3770
    assert stat.S_IMODE((tmp_path / "run" / "rounds" / "1" / "a").stat().st_mode) == 0o640


def as_user(place, user, umask, call):
    """Makes a call as another user of one group, after opening the test's own folders to that user."""
    for folder in (*place.parents, place):
        if stat.S_IMODE(folder.stat().st_mode) & 0o011 == 0 and folder.owner() == "root":
            folder.chmod(folder.stat().st_mode | 0o011)

    def become_and_call():
        os.setgroups([])
        os.setgid(4321)
        os.setuid(user)
        os.umask(umask)
        call()

    assert forked.code_of(become_and_call) == 0


@CHANGES_USERS
def test_users_of_any_umask_share_a_run_and_an_object_that_is_closed_to_others_is_none(tmp_path):
    name, others, own = tmp_path / "run" / MESSAGE, b"x" * 40, Keyed(Disk(tmp_path / "run"), KEY)
    (tmp_path / "run").chmod(0o777)
    as_user(tmp_path, 1001, 0o077, lambda: Disk(tmp_path / "run").put_if_absent(MESSAGE, others))

    def read():
        assert Disk(tmp_path / "run").get(MESSAGE, 99) == others

    def refuse():
        with pytest.raises(MessageError, match="cannot be read by this user"):
            Disk(tmp_path / "run").get(MESSAGE, 99)
        assert own.put_if_absent(MESSAGE, b"own")
        assert own.get(MESSAGE, 99) == b"own"

    as_user(tmp_path, 1002, 0o077, read)
    name.chmod(0)
    as_user(tmp_path, 1002, 0o077, refuse)


@CHANGES_USERS
def test_with_a_sticky_folder_a_worker_cannot_delete_or_replace_what_another_wrote(tmp_path):
    """The recipe of docs/folder.md: two users of one group, chmod 3770."""
    for made in ("run", "run/.partial", "run/rounds", "run/rounds/1"):
        (tmp_path / made).mkdir()
        os.chown(tmp_path / made, 0, 4321)
        (tmp_path / made).chmod(0o3770)

    def put(user, name):
        as_user(
            tmp_path, user, 0o027, lambda: Disk(tmp_path / "run").put_if_absent(f"rounds/{name}", f"of {user}".encode())
        )

    def delete():
        with pytest.raises(ExchangeError, match="access denied"):
            Disk(tmp_path / "run").delete(["rounds/1/a", "rounds/1/c"])
        assert Disk(tmp_path / "run").get("rounds/1/c", 9) is None  # its own, after one that it may not delete
        with pytest.raises(PermissionError):
            os.replace(tmp_path / "run" / "rounds" / "1" / "b", tmp_path / "run" / "rounds" / "1" / "a")
        assert Disk(tmp_path / "run").get("rounds/1/a", 9) == b"of 1001"

    for user, name in ((1001, "1/a"), (1002, "1/b"), (1002, "1/c"), (1002, "2/b"), (1001, "2/a")):
        put(user, name)
    as_user(tmp_path, 1002, 0o027, delete)
    as_user(tmp_path, 1002, 0o027, lambda: Disk(tmp_path / "run").delete(["rounds/2/a"]))  # the maker of a folder can
