"""Two texts of tens of megabytes from Debian packages, one of English and one of code: neither is trained on elsewhere.

    python -m laboratory.texts [--out runs/texts]

Needs apt-get and dpkg-deb, and installs nothing. Writes english.txt and code.txt, and texts.json with the versions of
the packages and the SHA-256 of each text: results name both, so that anyone can make the same texts again. Markup is
stripped from the English; files follow each other in the order of their paths.
"""

import argparse
import gzip
import hashlib
import html
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

PACKAGES = {
    "english": ["anarchism", "bible-kjv-text", "perl-doc", "postgresql-doc-15", "vim-doc"],
    "code": ["golang-1.19-src"],
}
SUFFIXES = {"english": (".html", ".pod", ".txt", ".raw.gz", ".txt.gz"), "code": (".go",)}
_UNSEEN = re.compile(r"<(script|style|head)\b.*?</\1>", re.DOTALL | re.IGNORECASE)
_TAG = re.compile(r"<[^>]*>")
_BLANK = re.compile(r"[ \t]*\n\s*\n\s*")


def plain(text: str) -> str:
    """Strips HTML: tags, invisible parts, entities, repeated blank lines.

    Examples:
        >>> plain("<head><title>x</title></head><p>Fish &amp; chips</p>")
        'Fish & chips'
    """
    return _BLANK.sub("\n\n", html.unescape(_TAG.sub("", _UNSEEN.sub("", text)))).strip()


def parts(folder: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Yields the text of each file with one of these suffixes."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file() or not path.name.endswith(suffixes):
            continue
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode(errors="replace")
        yield plain(text) if path.suffix == ".html" else text.strip()


def main() -> None:
    """Makes both texts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/texts"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    record = {}
    for name, packages in PACKAGES.items():
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["apt-get", "download", "--quiet", *packages], cwd=folder, check=True, capture_output=True)
            archives = sorted(Path(folder).glob("*.deb"))
            for archive in archives:
                subprocess.run(["dpkg-deb", "--extract", archive, Path(folder, "files")], check=True)
            text = "\n\n".join(parts(Path(folder, "files"), SUFFIXES[name])).encode()
            (out / f"{name}.txt").write_bytes(text)
            versions = [archive.name.removesuffix(".deb").replace("%3a", ":") for archive in archives]
        record[name] = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest(), "packages": versions}
    (out / "texts.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
