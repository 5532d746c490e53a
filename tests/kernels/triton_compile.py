"""Compiles every kernel for a GPU that need not be there, and prints what each came to, as JSON.

    python tests/kernels/triton_compile.py 90

The argument is the compute capability, times 10. Needs what Triton's own wheel brings, and no driver.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from demopt.kernels import triton_apply_programs as apply_programs
from demopt.kernels import triton_extract_programs as extract_programs

KINDS = {
    "table": "*i64", "member_of_chunk": "*i32", "momentum": "*fp32", "rows_rr": "*fp32", "columns_cc": "*fp32",
    "positions": "*i64", "values": "*fp32", "levels": "*i64", "codes": "*i64",
    "decay": "fp32", "scale": "fp32", "rate": "fp32",
}  # fmt: skip
INTEGERS = ["keep", "chunks", "world_size", "guard", "first_chunk"]
FULL = {"r": 64, "c": 64, "BR": 64, "BC": 64}
PADDED = {"r": 50, "c": 35, "BR": 64, "BC": 64, "CODE": 0, "ALIGNED": False}
WIDE = {"CODE": 1, "ALIGNED": True}
ROWS = {"c": 64, "T": 16, "BC": 64, "CODE": 0}
INVERSE = {"BITS_C": 11, "PRECISION": "tf32", "MEAN": False}
FORWARD = {"PRECISION": "tf32x3"}

#: name: (kernel, warps, compile-time arguments), as triton_extract and triton_apply launch them.
VARIANTS: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "extract, float32": (extract_programs.extract_chunks, 4, FULL | WIDE | FORWARD),
    "extract, bfloat16": (extract_programs.extract_chunks, 4, FULL | WIDE | FORWARD | {"CODE": 2}),
    "extract, padded": (extract_programs.extract_chunks, 4, PADDED | FORWARD),
    "extract, vectors": (extract_programs.extract_rows, 4, ROWS | FORWARD),
    "apply, float32": (apply_programs.apply_chunks, 8, FULL | WIDE | INVERSE | {"WIDE": False, "BITS_R": 11}),
    "apply, int8": (apply_programs.apply_chunks, 8, FULL | WIDE | INVERSE | {"WIDE": True, "BITS_R": 11, "CODE": 2}),
    "apply, padded": (apply_programs.apply_chunks, 8, PADDED | INVERSE | {"WIDE": False, "BITS_R": 11}),
    "apply, vectors": (apply_programs.apply_rows, 4, ROWS | INVERSE),
}


def compiled(kernel: Any, warps: int, constants: dict[str, Any], capability: int) -> Any:
    """The kernel for a target, its pointers aligned to 16 bytes as an allocator's are."""
    names = kernel.arg_names
    signature = {name: KINDS.get(name, "i32" if name in INTEGERS else "constexpr") for name in names}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if signature[name].startswith("*")}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=fixed, attrs=aligned)
    options = {"num_warps": warps, "enable_fp_fusion": kernel.__name__.startswith("extract")}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of stack that it spills to, as the GPU's assembler settled them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK):(\d+)", text))
    return {"registers": int(found["REG"]), "stack": int(found["STACK"])}


def main() -> None:
    report = {}
    for name, (kernel, warps, constants) in VARIANTS.items():
        made = compiled(kernel, warps, constants, int(sys.argv[1]))
        specialised = [
            parameter.name
            for parameter in kernel.params
            if parameter.name in INTEGERS and not parameter.do_not_specialize
        ]
        report[name] = resources(made.asm["cubin"]) | {
            "shared": made.metadata.shared,
            "fused": len(re.findall(r"\bfma\.rn\.f32\b", made.asm["ptx"])),
            "specialised": specialised,
        }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main()
