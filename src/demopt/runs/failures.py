"""The meaning of a failed request to a store: whether it may pass, and what to do. `TABLE` decides for all stores."""

import errno
import html
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple

from demopt.errors import ExchangeError


class StoreError(ExchangeError):
    """A request failed and may succeed later. `at_first`: only if a request of its kind has succeeded before."""

    def __init__(self, reason: str, at_first: bool = False) -> None:
        super().__init__(reason)
        self.at_first = at_first


class DeniedError(ExchangeError):
    """A request failed, and none of its kind succeeds until a setting is corrected."""


class LinkError(OSError):
    """A file system refused a hard link for a reason that never passes."""


class GoneError(OSError):
    """The folder of a run is gone, or is not the one that was opened."""


class When(Enum):
    """How long a failure lasts."""

    PASSES = "a later request may succeed"
    SETTINGS = "no request succeeds until a setting is corrected, unless some have succeeded already"
    NEVER = "no request will succeed"


class Failure(NamedTuple):
    """A row of the table. `sign` is searched for in an error's type, number or text; the first row that fits counts."""

    sign: str
    when: When
    told: str  # what is wrong, and what to do


_AWAY = "errno (EIO|ESTALE|ENOTCONN|ETIMEDOUT|EHOST|ENODEV|ENXIO)"
_METADATA = "169.254.169.254"  # the server that virtual machines of a cloud ask for credentials
CREDENTIALS = (
    "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, or "
    "AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY"
)
PASSES, SETTINGS, NEVER = When
TABLE = tuple(map(Failure._make, (
    # Folders
    ("LinkError", NEVER, "this file system has no hard links, which a run needs; use another disk or a bucket"),
    ("GoneError", PASSES, "the folder of the run is gone; is its disk mounted?"),
    ("errno (ENOSPC|EDQUOT)", PASSES, "the disk is full; free some space or inodes"),
    ("errno EROFS", SETTINGS, "the disk is read-only; mount it for writing"),
    ("errno EFBIG", NEVER, "a file would be too long for this disk, or for the limit of ulimit -f"),
    ("errno (ENAMETOOLONG|EILSEQ)", NEVER, "this disk refuses a name that a run needs; use another one"),
    ("errno (EMFILE|ENFILE)", PASSES, "too many open files; raise the limit of ulimit -n"),
    ("errno (EACCES|EPERM)", SETTINGS, "access denied; a worker reads, writes and deletes files in this folder"),
    (_AWAY, PASSES, "the disk does not answer"),
    # Credentials and clock
    (r"169\.254\.169\.254|Missing(SecretAccess)?Key|MissingAccount|Missing\w*Credential", SETTINGS, CREDENTIALS),
    ("ExpiredToken|TokenRefreshRequired|InvalidToken", SETTINGS,
     "the credentials' token has expired; get a new one, and start this command again (Ctrl-C saves)"),
    ("RequestTimeTooSkewed|RequestExpired", SETTINGS, "the clock of this machine or the server is wrong; set the time"),
    ("SignatureDoesNotMatch|InvalidAccessKeyId|AuthenticationFailed|Unauthenticated|: 401 ", SETTINGS,
     "wrong credentials"),
    # Addresses
    ("redirect|PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocation", SETTINGS,
     "the bucket is in another region than the request; set AWS_REGION, or AWS_ENDPOINT_URL"),
    ("NoSuchBucket|ContainerNotFound|FileNotFoundError|: 404 ", SETTINGS,
     "no such bucket or folder; create it, or correct the name"),
    ("dns error", PASSES,
     "no server has this name; correct AWS_ENDPOINT_URL, or the account of az://, or check the network"),
    ("InvalidContentType|[Cc]ertificate|UnknownIssuer", SETTINGS,
     "no TLS with this server; is its address http://? or trust its certificate (SSL_CERT_FILE)"),
    # Races, and what a server cannot do
    ("ConditionalRequestConflict|: 409 (?!.*NotSupported)", PASSES, "another put of the same object is under way"),
    ("InvalidPath", SETTINGS, "somebody put an object with an impossible name; delete it with the server's own tools"),
    ("Content-MD5", SETTINGS, "this bucket wants checksums, as with Object Lock; set AWS_CHECKSUM_ALGORITHM=SHA256"),
    ("NotImplemented|NotSupported|: 501 |If-None-Match", NEVER,
     "this server lacks what a run needs: put if absent (If-None-Match); update it, or use another store"),
    ("Header missing", SETTINGS,
     "the server, or a proxy before it, leaves out a header that clients need; update it, or use another store"),
    ("EntityTooLarge|BodyTooLarge|: 413 ", NEVER,
     "the server, or a proxy before it, refuses an object of this size; raise its limit (nginx: client_max_body_size)"),
    (": 507 |Quota", PASSES, "the store is full"),
    ("PermissionDenied|AccessDenied|: 403 ", SETTINGS,
     "access denied; a worker gets, puts, lists and deletes objects below this address"),
    (": 429 |: 408 |: 5.. |SlowDown|RequestTimeout", PASSES, "the server is busy"),
    (": 4.. ", SETTINGS, "the server refuses the request"),
    ("kind: Timeout", PASSES, "the server is silent"),
    ("HTTP error", PASSES, "no connection"),
    ("", PASSES, "it failed"),
)))  # fmt: skip


@contextmanager
def told(address: str) -> Iterator[None]:
    """Turns another library's or the system's error into StoreError if it may pass, else into ExchangeError.

    Examples:
        >>> with told("/mnt/run"):
        ...     raise OSError(errno.ENOSPC, "No space left on device")
        Traceback (most recent call last):
        demopt.runs.failures.StoreError: /mnt/run: the disk is full; free some space or inodes (No space left on device)
    """
    try:
        yield
    except Exception as error:
        if not (isinstance(error, OSError) or type(error).__module__.startswith("obstore")):
            raise
        row = next(row for row in TABLE if re.search(row.sign, _signs(error)))
        cause = "" if row.told == CREDENTIALS else _cause(error)
        text = f"{address}: {row.told}" + f" ({cause})" * bool(cause)
        if row.when is NEVER:
            raise ExchangeError(text) from error
        raise StoreError(text, at_first=row.when is SETTINGS) from error


def is_away(error: OSError) -> bool:
    """Whether a disk does not answer, as a share whose server is down."""
    return re.search(_AWAY, _signs(error)) is not None


def _signs(error: Exception) -> str:
    """Returns the text that is searched for the table's signs, without objects' names, which may contain anything."""
    text, kind = str(error), type(error).__name__
    if number := errno.errorcode.get(getattr(error, "errno", None) or 0):
        return f"{kind} errno {number}"
    if answer := re.search(r"status code(: \d{3} .*?)(\n\nDebug source|$)", text, re.S):
        said = re.sub(r"<(Key|Resource|BucketName)>.*?</\1>", "", answer[1], flags=re.S)
        return f"{kind}{said}" + (_METADATA if _METADATA in text else "")
    return f"{kind} " + re.sub(r"https?://(?!169\.254\.169\.254)\S+|for path .*?: |path: \".*?\"", "", text)


def _cause(error: Exception) -> str:
    """Returns the server's code and message, the system's error, or what broke the connection, in one line."""
    text = str(error)
    status = re.search(r"status code: (\d{3})", text)
    code, message = (
        re.search(rf"<{tag}>(.*?)</{tag}>|\"{tag.lower()}\": *\"(.*?)\"", text, re.S) for tag in ("Code", "Message")
    )
    known = [said for found in (code, message) if found and (said := html.unescape(found[1] or "") or found[2])]
    if known:
        found = f"{status[1] if status else ''} {': '.join(known)}"
    elif isinstance(error, OSError) and error.strerror:
        found = error.strerror
    elif "HttpError" in text:
        broken = re.search(r"ConnectError\(\s*\"([^\"]*)\",(?:\s*([\d.:\[\]]+),)?", text)
        reasons = re.findall(r"(?:message|error): \"([^\"]*)\"", text)
        unquoted = re.findall(r"(?<=InvalidCertificate\()\s*\w+|IncompleteBody|InvalidContentType", text)
        reasons += [each.strip() for each in unquoted]
        asked = re.search(r"uri: Some\(\s*([^\s?,]+)", text)
        parts = [asked[1] if asked else "", *((each or "" for each in broken.groups()) if broken else ()), *reasons]
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            if os.environ.get(name) or os.environ.get(name.lower()):
                parts.append(f"through the proxy of {name}")
        found = ", ".join(filter(None, parts))
    else:
        answer = text.partition("\n\nDebug source")[0].rpartition(" - ")[2]
        found = answer.removeprefix("Server returned non-2xx status code: ").rstrip(": ")
    return "".join(letter if letter.isprintable() else " " for letter in found.strip())[:300]
