"""Loads the compiled kernels, the C files of this folder, if demopt was installed with a C compiler."""

import ctypes
import functools
import hashlib
import warnings
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).with_name("cpu.so.1")


@functools.lru_cache(maxsize=1)
def library() -> Any:
    """Returns the compiled kernels, or None: then torch operations do the same work, slower.

    A library that was built from another version of its sources, as after editing an editable install, is not used.
    """
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
    except OSError:
        return None
    loaded.demopt_source.restype = ctypes.c_char_p
    texts = b"".join(path.read_bytes() for path in sorted(LIBRARY.parent.glob("*.[ch]")))
    source = hashlib.blake2b(texts, digest_size=8).hexdigest()
    if loaded.demopt_source().decode() != source:
        warnings.warn("the CPU kernels are older than their sources; install demopt again", stacklevel=2)
        return None
    for name, numbers in (("pack", 2), ("unpack", 2), ("pack_unary", 4), ("unpack_unary", 3)):
        function = getattr(loaded, f"demopt_{name}")
        function.argtypes = [ctypes.c_void_p, *numbers * [ctypes.c_int64], ctypes.c_void_p]
        function.restype = ctypes.c_int64 if name.endswith("unary") else None
    loaded.demopt_level.restype = ctypes.c_int64
    return loaded
