"""A run in a folder of this machine, on a local disk or a share.

An object appears by a hard link to a file that is complete and on the disk. So a put is atomic and survives a loss of
power, and of puts that race one wins. Anyone who can write to the folder can make links in it, so none is followed.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import (
    EACCES,
    EBADF,
    EINVAL,
    ELOOP,
    EMLINK,
    ENOSYS,
    ENOTCONN,
    ENOTDIR,
    ENOTSUP,
    ENXIO,
    EOPNOTSUPP,
    EPERM,
    EXDEV,
)
from pathlib import Path

from demopt.errors import MessageError
from demopt.runs.failures import GoneError, LinkError, told
from demopt.runs.store import RECORD, Store

_NO_LINKS = {EPERM, ENOSYS, ENOTSUP, EOPNOTSUPP, EXDEV, EMLINK, EINVAL}
_PARTIAL = ".partial"  # where files are written before they are linked
_LEFT = 86_400.0  # seconds after which a killed process's file there is deleted
_BY_DESCRIPTOR = os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW")  # not on Windows
_FILE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_FOLDER = _FILE | getattr(os, "O_DIRECTORY", 0)


class Disk(Store):
    """A folder, which is made if it is absent. If its disk goes away: StoreError, and the folder is not made again.

    Examples:
        >>> import tempfile
        >>> store = Disk(tempfile.mkdtemp())
        >>> store.put_if_absent("a/b", b"first"), store.put_if_absent("a/b", b"second"), store.get("a/b", most=9)
        (True, False, b'first')
    """

    has_end = False

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root).resolve()
        self.address = str(self._root)
        self._root.mkdir(parents=True, exist_ok=True)
        self._opened_as = os.stat(self._root)
        self._run: tuple[str, bytes] | None = None  # name and content of the run's record, once it has been seen
        self._tidy = False
        self._has_linked = False  # this file system has hard links

    def get(self, name: str, most: int) -> bytes | None:
        with told(self.address):
            try:
                with self._at(name) as (leaf, here):
                    found = _content(leaf, here, most, name)
                    if found == b"":  # a loss of power, on a disk that does not keep its word: see `put_if_absent`
                        found = _content(f"{leaf}~", here, most, name)
                    if found == b"":
                        raise MessageError(f"{name} is empty, and so is its second name")
            except (FileNotFoundError, NotADirectoryError):
                return None
            if name.partition("~")[0] == RECORD and self._run is None and found is not None:  # with a key or without
                self._run = name, found
            return found

    def put_if_absent(self, name: str, data: bytes) -> bool:
        with told(self.address), self._at(name, make=True) as (leaf, here):
            # An object has bytes, so an empty file is none. Deleting it would race; a second name does not.
            for each in (leaf, f"{leaf}~"):
                if _size(each, here) is None and self._link(data, each, here):
                    if name.partition("~")[0] == RECORD:
                        self._run = name, data
                    return True
                if _size(each, here):
                    break
            return False

    def list(self, folder: str) -> set[str]:
        with told(self.address):
            try:
                with self._at(f"{folder}/.") as (place, here), os.scandir(place if here is None else here) as entries:
                    full = dict[str, bool]()
                    for each in entries:
                        with suppress(FileNotFoundError):  # deleted since; the others are there all the same
                            if each.is_file(follow_symlinks=False):
                                full[each.name] = each.stat(follow_symlinks=False).st_size > 0
                # A second name counts only beside an empty first one: anything else of that name is not read by `get`.
                # All names of a run are ASCII; a stranger's may be no text.
                found = {each for each in full if each.isascii() and not each.endswith("~")}
                return {each for each in found if full[each] or full.get(f"{each}~")}
            except (FileNotFoundError, NotADirectoryError):
                return set()

    def _delete(self, name: str) -> None:
        for each in (f"{name}~", name):
            none = suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError)
            with told(self.address), none, self._at(each) as (leaf, here):
                os.unlink(leaf, dir_fd=here)

    @contextmanager
    def _at(self, name: str, make: bool = False) -> Iterator[tuple[str, int | None]]:
        """Opens an object's folder, without links; yields its name there and a descriptor (Windows: path and None)."""
        *folders, leaf = name.split("/")
        with self._opened() as here:
            place, below = str(self._root), list[int | None]()
            try:
                for folder in folders:
                    place = os.path.join(place, folder) if here is None else folder
                    here = self._below(place, here, make)
                    below.append(here)
                yield (os.path.join(place, leaf) if here is None else leaf), here
            finally:
                for each in below:
                    if each is not None:
                        os.close(each)

    @contextmanager
    def _opened(self) -> Iterator[int | None]:
        """Opens the run's folder, if it is still the same one; GoneError if not."""
        here = None
        try:
            try:
                here = os.open(self._root, _FOLDER) if _BY_DESCRIPTOR else None
                found = os.stat(self._root) if here is None else os.fstat(here)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise GoneError(*error.args) from error
            if not os.path.samestat(found, self._opened_as):  # of another run, or mounted again, with new numbers
                name, run = self._run or (RECORD, None)
                leaf = name if here is not None else str(self._root / name)
                there = _content(leaf, here, 1 << 30, name) or _content(f"{leaf}~", here, 1 << 30, name)
                if run is not None and there != run:
                    raise GoneError("another folder is in its place")
                self._opened_as = found
            yield here
        finally:
            if here is not None:
                os.close(here)

    def _below(self, place: str, here: int | None, make: bool) -> int | None:
        """Opens a folder in a folder; `make`: makes it if it is absent, or replaces something else in its place."""
        for last in (not make, True):
            try:
                if _BY_DESCRIPTOR:
                    return os.open(place, _FOLDER, dir_fd=here)
                found = os.lstat(place)
                if stat.S_ISDIR(found.st_mode) and not getattr(found, "st_file_attributes", 0) & 0x400:
                    return None  # a folder, and no link or junction (a reparse point of Windows)
                raise NotADirectoryError(ENOTDIR, "Not a directory")
            except OSError as error:
                if error.errno == ELOOP:
                    error = NotADirectoryError(ENOTDIR, "Not a directory")
                if last:
                    raise error from None
                if isinstance(error, NotADirectoryError):
                    os.unlink(place, dir_fd=here)  # a link, whose target stays, or a file: a run has neither here
                elif not isinstance(error, FileNotFoundError):
                    raise
            with suppress(FileExistsError):
                os.mkdir(place, dir_fd=here)
                if here is not None:
                    made = os.open(place, _FOLDER, dir_fd=here)
                    try:
                        self._adopt(made, 0o7777)
                    finally:
                        os.close(made)
                    _keep(here)
        raise AssertionError

    def _adopt(self, made: int, bits: int) -> None:
        """Gives a new file or folder these bits of the run's own mode, so that users with any umask can share a run."""
        with suppress(OSError):  # a disk without modes
            os.fchmod(made, stat.S_IMODE(os.stat(self._root).st_mode) & bits)

    def _link(self, data: bytes, leaf: str, here: int | None) -> bool:
        """Writes a file aside, then links it to its name; returns False if something has the name."""
        with self._at(f"{_PARTIAL}/{os.getpid()}-{os.urandom(8).hex()}", make=True) as (aside, there):
            try:
                file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o666, dir_fd=there)
                with open(file, "wb") as written:
                    if there is not None:
                        self._adopt(file, 0o644)
                    if not self._tidy:
                        self._tidy = True
                        self._delete_left(aside, there, os.fstat(file).st_mtime)
                    written.write(data)
                    written.flush()
                    os.fsync(file)
                appeared = _appear(aside, there, leaf, here)
                self._has_linked = self._has_linked or appeared
                return appeared
            except LinkError as error:
                if self._has_linked:  # a share that has just died answers like this
                    raise OSError(ENOTCONN, f"{error.strerror}; hard links worked before") from error
                raise
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(aside, dir_fd=there)

    def _delete_left(self, aside: str, there: int | None, now: float) -> None:
        """Deletes the files of processes that were killed in the middle of a put. `now`: by the disk's clock."""
        with os.scandir(os.path.dirname(aside) if there is None else there) as entries:
            for each in entries:
                with suppress(OSError):
                    if now - each.stat(follow_symlinks=False).st_mtime > _LEFT:
                        os.unlink(each.path if there is None else each.name, dir_fd=there)


def _appear(aside: str, there: int | None, leaf: str, here: int | None) -> bool:
    """Gives a written file its name, atomically, unless something has the name; returns whether it did."""
    try:
        if os.name == "nt":
            os.rename(aside, leaf)  # Windows refuses to replace a file; elsewhere a rename replaces it
        else:
            os.link(aside, leaf, src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)
    except FileExistsError:
        return False
    except OSError as error:
        raise LinkError(*error.args) if error.errno in _NO_LINKS else error from None
    _keep(here)
    return True


def _keep(folder: int | None) -> None:
    """Fsyncs a folder where the system can: then its names survive a loss of power."""
    if folder is not None:
        try:
            os.fsync(folder)
        except OSError as error:
            if error.errno not in (EINVAL, EBADF, ENOSYS, ENOTSUP, EOPNOTSUPP):
                raise


def _content(leaf: str, here: int | None, most: int, name: str) -> bytes | None:
    """Returns the bytes of a file, or None; MessageError if it is too long, a link, or no file."""
    try:
        if here is None and not stat.S_ISREG(os.lstat(leaf).st_mode):
            raise MessageError(f"{name} is no file")
        file = os.open(leaf, os.O_RDONLY | _FILE, dir_fd=here)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (ELOOP, ENXIO, EMLINK):
            raise MessageError(f"{name} is no file") from None
        if error.errno == EACCES and here is not None:  # on Windows somebody may have it open
            raise MessageError(f"{name} cannot be read by this user") from None
        raise
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise MessageError(f"{name} is no file")
        if found.st_size > most:
            raise MessageError(f"{name} has {found.st_size:,} bytes, and at most {most:,} were expected")
        with open(file, "rb", closefd=False) as opened:
            return opened.read(found.st_size)  # a read of `most` would first allocate as much
    finally:
        os.close(file)


def _size(leaf: str, here: int | None) -> int | None:
    """Returns the length of a file, None if nothing has the name; anything else counts as a file with bytes."""
    try:
        found = os.stat(leaf, dir_fd=here, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else 1
