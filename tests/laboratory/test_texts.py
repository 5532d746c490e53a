"""Texts have the same bytes wherever they are made."""

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from laboratory import texts

FILES = {
    "fish-1/doc/a.rst": b"chips\n",
    "fish-1/doc/b.rst": b"fish",
    "fish-1/doc/releases/c.rst": b"no",
    "fish-1/d.rst": b"no",
}
TEXT = texts.Text(("fish-1/doc",), (".rst",), "")


def archive(folder: Path, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes the files as fish-1.tar.gz in this order, and makes its hash the wanted one."""
    path = folder / "fish-1.tar.gz"
    with tarfile.open(path, "w:gz") as made:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(FILES[name])
            made.addfile(member, io.BytesIO(FILES[name]))
    monkeypatch.setattr(texts, "ARCHIVES", {"fish-1": hashlib.sha256(path.read_bytes()).hexdigest()})


@pytest.mark.parametrize("order", [1, -1])
def test_a_text_does_not_depend_on_the_order_of_an_archive(order, tmp_path, monkeypatch):
    archive(tmp_path, list(FILES)[::order], monkeypatch)
    assert texts.joined(texts.documents(tmp_path, TEXT)) == b"fish\n\nchips"


def test_another_archive_is_refused(tmp_path, monkeypatch):
    archive(tmp_path, list(FILES), monkeypatch)
    path = tmp_path / "fish-1.tar.gz"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match=r"fish-1\.tar\.gz has the SHA-256"):
        list(texts.documents(tmp_path, TEXT))


def test_another_text_is_refused():
    with pytest.raises(ValueError, match=r"english\.txt has the SHA-256"):
        texts.check("english.txt", b"chips", texts.TEXTS["english"].sha256)
