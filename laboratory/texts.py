"""Three texts of tens of megabytes whose bytes do not change: from source packages of PyPI, by version and hash.

    python -m laboratory.texts [--out runs/texts]

Needs pip, and installs nothing. Writes english.txt (documentation), python.txt and cpp.txt (code), and texts.json.
Raises ValueError when the SHA-256 of a package or of a text differs from the one below. A text's documents follow
each other in the order of their hashes, so that its last twentieth, on which `laboratory.compare` validates, is a fixed
sample of all documents. No setting was chosen on cpp.txt: final tables use it.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ARCHIVES = {
    "buildbot-4.3.0": "cbf46a15004bb1229712285e4f2b98163a169868ea00783e5e0d7cf8d5e8d962",
    "cinder-29.0.0": "6372ca98db3d7781031ce5950b44698badd6176db794ff1f74b0621be583429e",
    "django-5.2.19": "ad03d8abc51dbff95ebf34b27123cf0c26a3b62db7ba0cd520783686362533d1",
    "grpcio-1.85.3": "8e18f15d1b09b8771edbf59d634b26cbe4903bc2577cb667264934a6655eb8b4",
    "neutron-29.0.0": "4dc123ed085a4b2cc8af1c4fa8d7162042c4e7cfa5e895f62e99a3b46d92ba31",
    "nova-34.0.0": "919eef77cda4ce0cc4746a5853b5d9341ebd0ae37bc8b1939eb77d17727c00df",
    "salt-3007.1": "b933ac4cb3e4b1118b46dada55c9cc6bdc6f0f94b4c92877aec44b25c6a28c9a",
    "sphinx-9.0.4": "594ef59d042972abbc581d8baa577404abe4e6c3b04ef61bd7fc2acbd51f3fa3",
    "sqlalchemy-2.0.50": "af5607d11ef90fd6a5c0549fe0045dce1663d427426bcfb506dcb5346a85a3b9",
    "twisted-26.10.0": "5f0355403e507fc23ceea85e9dbb4bc59335aabde41dd324e8b8cea180dd38de",
}


@dataclass(frozen=True)
class Text:
    """The files that a text is made of: below these folders of these archives, with these suffixes."""

    folders: tuple[str, ...]
    suffixes: tuple[str, ...]
    sha256: str


_DOCUMENTATION = """
    buildbot-4.3.0/docs cinder-29.0.0/doc django-5.2.19/docs neutron-29.0.0/doc nova-34.0.0/doc salt-3007.1/doc/topics
    sphinx-9.0.4/doc sqlalchemy-2.0.50/doc/build twisted-26.10.0/docs
"""
_PYTHON = "django-5.2.19 sqlalchemy-2.0.50 twisted-26.10.0 nova-34.0.0/nova"
_GRPC, _BORINGSSL = "grpcio-1.85.3", "grpcio-1.85.3/third_party/boringssl-with-bazel"
_CPP = f"""
    {_GRPC}/src/core/lib {_GRPC}/third_party/abseil-cpp {_GRPC}/third_party/cares {_GRPC}/third_party/re2
    {_BORINGSSL}/ssl {_BORINGSSL}/pki {_BORINGSSL}/crypto
"""

TEXTS = {
    "english": Text(
        tuple(_DOCUMENTATION.split()),
        (".rst", ".txt"),
        "7c2077622a853187d6a7997a5940a04aa1c17aa4111ec717a1738326e45369f8",
    ),
    "python": Text(
        tuple(_PYTHON.split()), (".py",), "a8666b5e9ba2609952e3fd732c5bd9e9c91b2c6a14041c40cde134769bc98bb6"
    ),
    "cpp": Text(
        tuple(_CPP.split()),
        (".cc", ".h", ".c"),
        "31dbc65cdd9e29db69727878a0fa8d5066a33bacc88f7b0d5d1d6239180f2f13",
    ),
}
_LEFT_OUT = "/releases/"  # lists of commits
_LONGEST = 400_000  # bytes of a document; longer ones are tables


def download(folder: Path) -> None:
    """Has pip download the archives into a folder; pip refuses one with another hash."""
    wanted, lines, sources = folder / "requirements.txt", [], []
    for archive, sha256 in ARCHIVES.items():
        name, version = archive.rsplit("-", 1)
        lines.append(f"{name}=={version} --hash=sha256:{sha256}\n")
        sources.append(name)
    wanted.write_text("".join(lines))
    # Source for these packages only: otherwise pip would also build from source the tools that read their metadata.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ",".join(sources)]
    subprocess.run([*command, "--require-hashes", "--dest", folder, "--requirement", wanted], check=True)


def documents(folder: Path, text: Text) -> Iterator[bytes]:
    """Yields the files of a text, in any order."""
    for archive in sorted({name.split("/", 1)[0] for name in text.folders}):
        path = folder / f"{archive}.tar.gz"
        check(path.name, path.read_bytes(), ARCHIVES[archive])
        below = tuple(f"{name}/" for name in text.folders)
        with tarfile.open(path) as files:
            for member in files:
                inside = member.name.startswith(below) and _LEFT_OUT not in member.name
                if inside and member.isfile() and member.name.endswith(text.suffixes) and member.size <= _LONGEST:
                    content = files.extractfile(member)
                    assert content is not None, "a file has content"
                    yield content.read().strip()


def joined(found: Iterator[bytes]) -> bytes:
    """Joins documents, each once, in the order of their hashes.

    Examples:
        >>> joined(iter([b"fish", b"chips", b"fish"]))
        b'fish\\n\\nchips'
    """
    by_hash = {hashlib.sha256(document).digest(): document for document in found if document}
    return b"\n\n".join(by_hash[key] for key in sorted(by_hash))


def check(name: str, data: bytes, sha256: str) -> None:
    """Raises ValueError when the data have another SHA-256."""
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise ValueError(f"{name} has the SHA-256 {found}, and {sha256} was wanted: no result may be compared with it")


def main() -> None:
    """Makes all texts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/texts"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    record = {}
    with tempfile.TemporaryDirectory() as folder:
        download(Path(folder))
        for name, text in TEXTS.items():
            data = joined(documents(Path(folder), text))
            check(f"{name}.txt", data, text.sha256)
            (out / f"{name}.txt").write_bytes(data)
            record[name] = {"bytes": len(data), "sha256": text.sha256, "folders": text.folders}
    (out / "texts.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
