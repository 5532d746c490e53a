"""Doctests import every module; those for Triton and for frameworks need what is not to be had everywhere."""

import importlib.util

collect_ignore_glob = []
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["src/demopt/kernels/triton_chunks.py", "src/demopt/kernels/triton_*_programs.py"]
for name in ("accelerate", "lightning", "ray", "torchtitan", "transformers"):
    if importlib.util.find_spec(name) is None:
        collect_ignore_glob.append(f"src/demopt/integrations/{name}.py")
