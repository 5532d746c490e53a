"""Doctests import every module; those written in Triton's language need it, and it is not to be had everywhere."""

import importlib.util

collect_ignore_glob = []
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["src/demopt/kernels/triton_chunks.py", "src/demopt/kernels/triton_*_programs.py"]
