"""A failed request tells cause and remedy: at once if it can never pass; otherwise the worker waits. A case per row."""

import errno
import os
import re
import threading
import time
from unittest.mock import DEFAULT, Mock

import pytest
import servers
from servers import error, small_s3
from stores import Through
from workers import at_first

import problems
from demopt import FolderExchange
from demopt.errors import ExchangeError
from demopt.runs import disk, log
from demopt.runs import store as store_module
from demopt.runs.disk import Disk
from demopt.runs.failures import TABLE, DeniedError, GoneError, LinkError, StoreError, When, told
from demopt.runs.stop import put_stop
from demopt.runs.store import ClosedError, ObjectStore, Patient, open_store

NUMBERS = {
    "disk is full": errno.ENOSPC, "read-only": errno.EROFS, "too long": errno.EFBIG, "it failed": errno.ENOMEM,
    "refuses a name": errno.ENAMETOOLONG, "too many open files": errno.EMFILE, "disk does not answer": errno.ESTALE,
    "reads, writes and deletes": errno.EACCES,
}  # fmt: skip
SYSTEM = {
    **{words: OSError(number, os.strerror(number)) for words, number in NUMBERS.items()},
    "hard links": LinkError(errno.EPERM, "Operation not permitted"),
    "gone": GoneError(errno.ENOENT, "No such file or directory"),
    "no credentials": OSError("Error performing PUT http://169.254.169.254/latest/api/token"),
}
SERVER = {
    "token has expired": (400, error("ExpiredToken", "The provided token has expired.")),
    "clock": (403, error("RequestTimeTooSkewed")),
    "wrong credentials": (403, error("SignatureDoesNotMatch")),
    "another region": (301, error("PermanentRedirect")),
    "no such bucket": (404, error("NoSuchBucket")),
    "If-None-Match": (501, error("NotImplemented", "A header you provided is not implemented.")),
    "access denied; a worker gets": (403, error("AccessDenied", "not authorized to perform: kms:GenerateDataKey")),
    "another put": (409, error("ConditionalRequestConflict")),
    "store is full": (507, "full"),
    "busy": (503, error("SlowDown")),
    "refuses the request": (400, error("InvalidRequest")),
    "wants checksums": (400, error("InvalidRequest", "Content-MD5 OR x-amz-checksum- HTTP header is required")),
    "object of this size": (413, error("EntityTooLarge")),
}
# Rows whose tests are below.
ELSEWHERE = {"no server has this name", "no TLS", "impossible name", "no connection", "is silent", "a header"}


def row(words):
    (found,) = [each for each in TABLE if words in each.told]
    return found


def test_every_row_has_a_case():
    assert {row(words) for words in (*SYSTEM, *SERVER, *ELSEWHERE)} == set(TABLE)


def check(words, call, cause):
    """The row is used: the call ends at once if it can never pass, or if settings are wrong and nothing succeeded."""
    with pytest.raises(ExchangeError, match=words) as told_by:
        call()
    assert cause in str(told_by.value)
    assert "\n" not in str(told_by.value)
    when = row(words).when
    assert isinstance(told_by.value, StoreError) == (when is not When.NEVER)
    assert when is When.NEVER or told_by.value.at_first == (when is When.SETTINGS)


@pytest.mark.parametrize("words", SYSTEM)
def test_system_error_has_its_row(words):
    def call():
        with told("/mnt/run"):
            raise SYSTEM[words]

    check(words, call, SYSTEM[words].strerror or "/mnt/run: no credentials: set")


@pytest.mark.parametrize("words", SERVER)
def test_server_error_has_its_row_with_code_and_message(words, monkeypatch):
    status, body = SERVER[words]
    with small_s3(monkeypatch, lambda method, _: (status, body) if method == "PUT" else None):
        store = open_store("s3://bucket/Quota-of-EIO")  # names of objects must not decide the row
        cause = body[body.find("<Code>") + 6 : body.find("</Code>")] if status not in (301, 507) else "("
        check(words, lambda: store.put_if_absent("rounds/403/a", b"x"), cause)


def test_message_of_a_server_is_told_without_escapes(monkeypatch):
    body = error("RequestTimeTooSkewed", "the request&#39;s time &lt; the server&apos;s")
    with small_s3(monkeypatch, lambda method, _: (403, body) if method == "PUT" else None):
        store = open_store("s3://bucket/run")
        check("clock", lambda: store.put_if_absent("rounds/1/a", b"x"), "the request's time < the server's")


CONDITION = "<Condition>If-None-Match</Condition><Key>a</Key></Error>"


@pytest.mark.parametrize(
    ("words", "status", "body"),
    [
        ("another put", 409, error("ConditionalRequestConflict").replace("</Error>", CONDITION)),
        ("store is full", 403, error("QuotaExceeded")),
        ("busy", 400, error("RequestTimeout", "Your socket connection to the server was not read from")),
        ("busy", 503, error("SlowDown").replace("</Error>", "<BucketName>redirect</BucketName></Error>")),
        ("object of this size", 400, error("EntityTooLarge")),
    ],
)
def test_answer_whose_words_fit_several_rows_has_its_own(words, status, body, monkeypatch):
    with small_s3(monkeypatch, lambda method, _: (status, body) if method == "PUT" else (404, "")):
        store = open_store("s3://bucket/run")
        check(words, lambda: store.put_if_absent("rounds/1/a", b"x"), str(status))


def test_request_that_breaks_after_longer_than_the_patience_is_repeated(monkeypatch):
    monkeypatch.setattr(store_module, "_SILENCE", 0.0)
    store, broken = ObjectStore(), []

    def get(name, most):
        if not broken:
            time.sleep(0.3)
            broken.append(name)
            raise StoreError("connection reset")
        return b"x"

    store.get = get
    assert Patient(store, patience=0.2, say=pytest.fail).get("checkpoints/1", 9) == b"x"


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (error("AccessDenied", ""), r"\(403 AccessDenied\)"),  # Ceph sends no message
        (error("", "no right"), r"\(403 no right\)"),
        (error("", ""), r"\(403 Forbidden: .*\)"),
        ('{"error": {"code": 403, "message": ""}}', r"\(403 Forbidden: .*\)"),
        ("", r"\(403 Forbidden\)"),
    ],
)
def test_server_may_leave_out_code_or_message(body, cause, monkeypatch):
    with small_s3(monkeypatch, lambda *_: (403, body)), pytest.raises(StoreError, match=f"access denied.*{cause}"):
        open_store("s3://bucket/run").list("rounds")


@pytest.mark.parametrize(
    ("words", "endpoint", "cause"),
    [
        ("no connection", "http://127.0.0.1:9", "tcp connect error, 127.0.0.1:9, Connection refused"),
        ("no server has this name", "http://nowhere.invalid", "dns error"),
        ("no TLS", "https://{}", "127.0.0.1"),
    ],
)
def test_broken_connection_has_its_row(words, endpoint, cause, monkeypatch):
    with small_s3(monkeypatch):
        here = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint.format(here))
        check(words, lambda: open_store("s3://bucket/run").get("a", 9), cause)


def test_object_that_alone_cannot_be_read_is_no_wrong_setting(monkeypatch):
    closed = {"run/stop"}
    with small_s3(monkeypatch, lambda _, key: (403, error("InvalidObjectState")) if key in closed else None) as objects:
        store, objects["run/run"] = open_store("s3://bucket/run"), b"x"
        with pytest.raises(
            ClosedError, match=r"^stop cannot be read, though run can: .*\(403 InvalidObjectState: told"
        ):
            store.get("stop", 9)
        closed.add("run/run")
        for name in ("stop", "run"):
            with pytest.raises(StoreError, match="access denied"):
                store.get(name, 9)


@pytest.mark.parametrize("header", ["Content-Length", "ETag"])
def test_header_that_a_server_leaves_out_is_told_at_once(header, monkeypatch):
    send = servers._Handler.send_header
    keep = lambda self, name, value: None if name == header else send(self, name, value)  # noqa: E731
    with small_s3(monkeypatch) as objects:
        monkeypatch.setattr(servers._Handler, "send_header", keep)
        store, objects["run/run"] = open_store("s3://bucket/run"), b"x"
        put, get = (lambda: store.put_if_absent("a", b"x")), (lambda: store.get("run", 9))
        check("a header", put if header == "ETag" else get, f"{header} Header missing")


def test_page_of_a_network_that_wants_a_login_is_no_object_and_puts_nothing(monkeypatch):
    page, asked = "<!DOCTYPE html><p>Welcome", []

    def rule(method, key):
        asked.append((method, key))
        return (200, page) if asked.count((method, key)) <= 3 else None

    with small_s3(monkeypatch, rule) as objects:
        monkeypatch.setattr(store_module, "_TOLD_AFTER", 0.0)
        told_by, store = [], open_store("s3://bucket/run")
        objects["run/run"] = b"x"
        with pytest.raises(DeniedError, match="a web page came instead of the store's answer"):
            Patient(store, 60.0, told_by.append).get("run", 9)
        patient = Patient(store, 60.0, told_by.append)
        patient._answered |= {"get", "put"}
        assert patient.get("run", 9) == b"x"
        assert patient.put_if_absent("a", b"y") or objects["run/a"] == b"y"
        assert objects["run/a"] == b"y"
        assert any("web page" in text for text in told_by)
        objects["run/run"] = b"<!DOCTYPE html>" + bytes(range(128, 160))  # as the beginning of a keyed object may be
        assert store.get("run", 99) == objects["run/run"]


def test_body_that_a_connection_cuts_is_named(monkeypatch):
    send = servers._Handler.send_header

    def longer(self, name, value):
        self.close_connection = True
        send(self, name, str(int(value) + 9) if name == "Content-Length" else value)

    with small_s3(monkeypatch) as objects:
        monkeypatch.setattr(servers._Handler, "send_header", longer)
        store, objects["run/run"] = open_store("s3://bucket/run"), b"x"
        check("no connection", lambda: store.get("run", 99), "(IncompleteBody)")


def test_silent_server_is_not_one_without_a_connection(monkeypatch):
    monkeypatch.setattr(store_module, "_SILENCE", 1.0)
    ended = threading.Event()
    with small_s3(monkeypatch, lambda *_: ended.wait(60) and None):
        check("the server is silent", lambda: open_store("s3://bucket/run").get("a", 9), "/bucket/run/a")
        ended.set()


def test_proxy_of_the_environment_is_named(monkeypatch):
    with small_s3(monkeypatch):
        for name, value in (("HTTP_PROXY", "http://user:word@127.0.0.1:9"), ("NO_PROXY", ""), ("no_proxy", "")):
            monkeypatch.setenv(name, value)
        with pytest.raises(StoreError, match="through the proxy of HTTP_PROXY") as told_by:
            open_store("s3://bucket/run").get("a", 9)
    assert "word" not in str(told_by.value)


@pytest.mark.parametrize("name", ["rounds/1//x", "rounds/1/../x", "rounds/1/a\nb"])
def test_name_that_no_list_can_hold_is_named(name, monkeypatch):
    with small_s3(monkeypatch) as objects:
        objects[f"run/{name}"] = b"x"
        cause = name.replace("\n", " ").removeprefix("rounds/1/")
        check("impossible name", lambda: open_store("s3://bucket/run").list("rounds/1"), cause)


def test_cause_without_words_is_told_without_brackets():
    with pytest.raises(StoreError, match=r"^here: it failed$"), told("here"):
        raise OSError


def test_error_of_the_code_itself_is_no_failure_of_the_store():
    with pytest.raises(ZeroDivisionError), told("x"):
        raise ZeroDivisionError


def failing(failure, times=10**9, call="put_if_absent"):
    """A store in memory whose first puts, or other calls, fail."""
    left = [times]

    def fail(made):
        if made == call and left[0] > 0:
            left[0] -= 1
            raise failure

    return Through(ObjectStore(), fail)


def test_patient_repeats_then_gives_up_and_early_if_there_never_was_an_answer(monkeypatch):
    busy = StoreError("503 Slow Down")
    assert Patient(failing(busy, times=4), patience=60.0, say=str).put_if_absent("a", b"x")
    with pytest.raises(ExchangeError, match=r"did not answer for .* 503 Slow Down"):
        Patient(failing(busy), patience=0.01, say=str).put_if_absent("a", b"x")
    monkeypatch.setattr(store_module, "_FIRST_PATIENCE", 0.0)
    with pytest.raises(ExchangeError, match="503 Slow Down"):  # the address may be wrong
        Patient(failing(busy), patience=1e9, say=str).put_if_absent("a", b"x")


def test_wrong_setting_ends_at_once_although_reads_succeed():
    patient = Patient(failing(StoreError("denied", at_first=True)), patience=1e9, say=pytest.fail)
    assert patient.get("run", 9) is None  # an absent object can be seen to be absent
    with pytest.raises(ExchangeError, match="denied") as told_by:
        patient.put_if_absent("run", b"x")
    assert not isinstance(told_by.value, StoreError)
    assert patient.inner.calls == ["get", "put_if_absent"]


def test_wrong_setting_is_waited_for_once_a_request_of_its_kind_has_succeeded_but_not_a_deletion():
    """An object that cannot be deleted may stay."""
    denied = StoreError("denied", at_first=True)
    patient = Patient(ObjectStore(), patience=60.0, say=pytest.fail)
    patient.put_if_absent("a", b"x")
    patient.delete(["a"])
    patient.inner = failing(denied, times=3)  # credentials that are renewed
    assert patient.put_if_absent("b", b"x")
    assert patient.inner.calls == ["put_if_absent"] * 4
    patient.inner = failing(denied, call="delete")
    with pytest.raises(ExchangeError, match="denied"):
        patient.delete(["b"])
    assert patient.inner.calls == ["delete"]


def test_nothing_waits_for_a_deletion(monkeypatch):
    """As on a server that cannot delete: the only harm is that objects stay."""
    patient = Patient(ObjectStore(), patience=1e9, say=str)
    patient.put_if_absent("a", b"x")
    patient.delete(["a"])
    monkeypatch.setattr(store_module, "_FIRST_PATIENCE", 0.0)
    patient.inner = failing(StoreError("500"), call="delete")
    with pytest.raises(ExchangeError, match="500"):
        patient.delete(["a"])
    put_stop(patient, 0, "run")
    one_after_the_other = lambda calls: [call() for call in calls]  # noqa: E731
    log.check_races(patient, Mock(identity="run"), one_after_the_other)


def test_wish_to_stop_is_heard_while_the_store_is_away():
    said, asked = [], threading.Event()
    patient = Patient(failing(StoreError("away")), patience=1e9, say=lambda text: (said.append(text), asked.set()))
    patient.asked_to_stop = asked.is_set
    with pytest.raises(ExchangeError, match="stopped while the store did not answer: away"):
        patient.put_if_absent("a", b"x")
    assert len(said) == 1


def test_outage_of_one_kind_of_request_is_told_once_while_others_pass(monkeypatch):
    monkeypatch.setattr(store_module, "_TOLD_AFTER", 0.0)
    said, puts = [], iter(range(8))

    def put(name, data):
        assert patient.list("rounds") == set(), "requests of other threads pass"
        if next(puts) < 5:
            raise StoreError("the disk is full")
        return True

    store = Mock(spec=Disk, address="disk", has_end=True, put_if_absent=Mock(side_effect=put))
    store.list.return_value = set()
    patient = Patient(store, patience=1e9, say=said.append)
    assert patient.put_if_absent("checkpoints/1", b"x")
    away, again = said
    assert ("the disk is full" in away, "answers again" in again) == (True, True)
    said.clear()
    patient.patience, store.put_if_absent.side_effect = 0.05, StoreError("the disk is full")
    for _ in range(3):  # giving up does not end the outage
        with pytest.raises(ExchangeError, match="did not answer"):
            patient.put_if_absent("checkpoints/2", b"x")
    assert patient.list("rounds") == set()
    store.put_if_absent.side_effect = [True]
    assert patient.put_if_absent("checkpoints/2", b"x")
    away, again = said
    assert ("the disk is full" in away, "answers again" in again) == (True, True)


def test_outage_that_ends_with_a_refused_delete_hides_no_later_one(monkeypatch):
    monkeypatch.setattr(store_module, "_TOLD_AFTER", 0.0)
    said, store = [], Mock(spec=Disk, address="disk", has_end=True)
    store.delete.side_effect = [StoreError("away"), StoreError("away"), StoreError("no right to delete", at_first=True)]
    store.put_if_absent.side_effect = [True, StoreError("away"), StoreError("away"), True]
    patient = Patient(store, patience=1e9, say=said.append)
    with pytest.raises(DeniedError, match="no right"):
        patient.delete(["old"])
    for name in ("a", "b"):
        assert patient.put_if_absent(name, b"x")
    assert ["answers again" in each for each in said] == [False, True, False, True]


def test_request_that_has_no_end_on_a_disk_is_told_waited_for_and_left_behind_by_a_wish_to_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "_SILENCE", 0.05)
    monkeypatch.setattr(store_module, "_TOLD_AFTER", 0.0)
    store, answers, said = Disk(tmp_path / "run"), threading.Event(), []
    store.list = Mock(side_effect=lambda _, found=store.list: answers.wait(60) and found("rounds"))
    patient = Patient(store, patience=1e9, say=lambda text: (said.append(text), answers.set()))
    assert patient.list("rounds") == set()
    away = rf"{store.address}: the disk does not answer \(a list has no end\)"
    assert re.fullmatch(f"the store does not answer, waiting up to 30 s: {away}", said[0])
    assert "answers again" in said[1]
    store.list.assert_called_once()
    answers.clear()
    patient.asked_to_stop = lambda: not answers.clear()
    with pytest.raises(ExchangeError, match=f"stopped while the store did not answer: {away}"):
        patient.list("rounds")
    answers.clear()
    patient.patience = 0.0
    with pytest.raises(ExchangeError, match=f"did not answer for .*: {away}"):
        patient.list("rounds")
    answers.set()


def test_put_of_a_long_object_on_a_slow_disk_is_waited_for_where_the_user_asks_to_stop(monkeypatch):
    for name in ("_SILENCE", "_LONG_SILENCE", "_TOLD_AFTER"):
        monkeypatch.setattr(store_module, name, 0.05)
    data, store = bytes(20_000_000), Mock(spec=Disk, address="disk", has_end=False)
    store.put_if_absent.side_effect = store.get.side_effect = lambda *_: time.sleep(0.5) or data
    patient = Patient(store, patience=600.0, say=pytest.fail)
    patient.asked_to_stop = lambda: True
    assert patient.put_if_absent("checkpoints/1", data)
    patient.say = Mock()
    with pytest.raises(ExchangeError, match="stopped while the store did not answer"):
        patient.get("checkpoints/1", len(data))


def test_request_to_a_disk_that_a_pause_of_the_process_has_made_long_is_waited_for(monkeypatch):
    monkeypatch.setattr(store_module, "_SILENCE", 2.0)
    store = Mock(spec=Disk, address="disk", has_end=False)
    store.list.side_effect = lambda _: time.sleep(2.3) or {"a"}
    assert Patient(store, patience=1.8, say=pytest.fail).list("rounds") == {"a"}


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOTCONN, None])
def test_path_on_a_disk_that_does_not_answer_is_no_wrong_one(number, tmp_path, monkeypatch):
    answers = threading.Event()

    def exists(_):
        if number is not None:
            raise OSError(number, os.strerror(number))
        answers.wait(60)

    monkeypatch.setattr(store_module, "_FIRST_PATIENCE", 0.05)
    monkeypatch.setattr(store_module.Path, "exists", exists)
    with pytest.raises(ExchangeError, match=r"run: the disk (does not answer \(|has not answered)"):
        open_store(str(tmp_path / "run"))
    answers.set()


def test_cause_of_an_outage_that_changes_is_told(monkeypatch):
    monkeypatch.setattr(store_module, "_TOLD_AFTER", 0.0)
    causes, said = ["no connection (refused)", "no connection (reset)", "wrong credentials (403)"], []
    failures = iter([StoreError(each) for each in causes])

    def fail(_):
        if (failure := next(failures, None)) is not None:
            raise failure

    Patient(Through(ObjectStore(), fail), patience=60.0, say=said.append).list("rounds")
    assert [text.rpartition(": ")[2] for text in said[:-1]] == [causes[0], causes[2]]


def test_conflict_in_which_nothing_was_written_is_put_again(monkeypatch):
    conflict, asked = (409, error("ConditionalRequestConflict")), []

    def once(*request):
        asked.append(request)
        return conflict if request[0] == "PUT" and asked.count(request) == 1 else None

    with small_s3(monkeypatch, once) as objects:
        patient, objects["run/b"] = Patient(open_store("s3://bucket/run"), patience=60.0, say=pytest.fail), b"another's"
        assert patient.put_if_absent("a", b"x")
        assert not patient.put_if_absent("b", b"x")  # a 409, and the object is there
        assert objects == {"run/a": b"x", "run/b": b"another's"}


def test_put_that_was_done_and_answered_500_is_found_to_be_there(monkeypatch):
    with small_s3(monkeypatch, at_first(lambda *_: (-500, ""), lambda *_: None)) as objects:
        assert not Patient(open_store("s3://bucket/run"), patience=60.0, say=pytest.fail).put_if_absent("a", b"x")
        assert objects == {"run/a": b"x"}


def test_wish_to_stop_whose_answer_is_lost_is_found_to_be_there():
    lossy, store = Mock(), ObjectStore()
    lossy.get, lossy.put_if_absent = store.get, lambda *given: store.put_if_absent(*given) and False
    put_stop(lossy, 0, "run")
    with pytest.raises(ExchangeError, match="cannot be deleted"):
        put_stop(lossy, 1, "run")


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV])
def test_disk_without_hard_links_is_refused_at_once(number, tmp_path, monkeypatch):
    monkeypatch.setattr(disk.os, "link", Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(ExchangeError, match="this file system has no hard links"):
        Patient(Disk(tmp_path / "run"), patience=1e9, say=pytest.fail).put_if_absent("run", b"x")
    assert not [*(tmp_path / "run").rglob("*-*")], "a file was left"
    monkeypatch.undo()  # from a disk that has linked, the same answer means that a share dies
    store, died = Disk(tmp_path / "run"), OSError(number, os.strerror(number))
    assert store.put_if_absent("run", b"x")
    monkeypatch.setattr(disk.os, "link", Mock(wraps=os.link, side_effect=[died, DEFAULT]))
    with pytest.raises(StoreError, match="the disk does not answer"):
        store.put_if_absent("rounds/1/a", b"x")
    assert store.put_if_absent("rounds/1/a", b"x")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_disk_whose_folders_cannot_be_fsynced_is_used_without(number, tmp_path, monkeypatch):
    fsync = os.fsync

    def no_folders(file):
        if os.path.isdir(f"/proc/self/fd/{file}"):
            raise OSError(number, "no fsync of a folder")
        fsync(file)

    monkeypatch.setattr(disk.os, "fsync", no_folders)
    assert Disk(tmp_path / "run").put_if_absent("rounds/1/a", b"x")


def test_full_disk_leaves_no_file_and_is_waited_for(tmp_path, monkeypatch):
    store, full = Disk(tmp_path / "run"), OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(disk.os, "fsync", Mock(side_effect=[full, full, None, None]))  # at last a file, and its folder
    assert Patient(store, patience=60.0, say=pytest.fail).put_if_absent("a", b"whole")
    assert store.get("a", 9) == b"whole"
    assert [each.name for each in (tmp_path / "run").rglob("*") if each.is_file()] == ["a"]


def test_server_that_cannot_delete_is_told_costs_no_more_requests_and_a_second_stop_names_the_object(monkeypatch):
    """As Google's S3 endpoint, which has no DeleteObjects."""
    asked, said = [], list[str]()
    with small_s3(monkeypatch, lambda method, key: asked.append((method, key))):
        run = FolderExchange("s3://bucket/run", late=0.1, checkpoint_every=2)
        run.say = said.append
        optimizer = problems.local(run, sync_every=1)
        counts = []
        for step in range(12):
            asked.clear()
            problems.fingerprints(optimizer, [step])
            run.wait_for_uploads()
            counts.append(len(asked))
        put_stop(run.store, 12, run.record.identity)
        with pytest.raises(ExchangeError, match=r"object stop that may not be deleted.*server's own tools"):
            put_stop(run.store, 12, run.record.identity)
    assert [text for text in said if "put if absent" in text] == []
    assert len([text for text in said if "not deleted, training goes on" in text and "cannot delete" in text]) == 1
    assert counts[6:8] == counts[8:10] == counts[10:]
