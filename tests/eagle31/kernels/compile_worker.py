"""Compile Triton's kernels for an H100 and print a line of JSON for each, with what ptxas gives it.

Triton does not compile where it interprets, so this is a process.
"""

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def compiled(module: str, function: str, types: dict[str, Any], num_warps: int) -> dict[str, int]:
    """Compile a kernel.

    Args:
        types: of each argument: Triton's name of the type, with `:16` where the value is a multiple of 16, as
            all pointers are; or the value of a constant, None included.
    """
    kernel = getattr(import_module(module), function)
    assert list(types) == kernel.arg_names
    signature = {name: kind.removesuffix(":16") for name, kind in types.items() if isinstance(kind, str)}
    constants = {name: value for name, value in types.items() if name not in signature}
    multiples = [name for name in signature if types[name].endswith(":16") or types[name].startswith("*")]
    position = kernel.arg_names.index
    source = ASTSource(
        fn=kernel,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs={(position(name),): value for name, value in constants.items()},
        attrs={(position(name),): [["tt.divisibility", 16]] for name in multiples},
    )
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [str(TOOL), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {key.lower(): int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {**found, "shared": binary.metadata.shared}


if __name__ == "__main__":
    for spec in json.loads(sys.argv[1]):
        print(json.dumps(compiled(**spec)), flush=True)
