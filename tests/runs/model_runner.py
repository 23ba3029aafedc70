"""vLLM's two model runners: V1, which a CPU takes by default, and V2, which a GPU takes.

V2 needs Triton. vLLM's environment has the package, whose interpreter runs kernels on CPU tensors; vLLM asks
for a backend of the name "cpu" as well, which the package lacks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

# vLLM looks at whether the driver is active, and some of its modules at the name of the target.
_BACKEND = """
from types import SimpleNamespace

import triton.backends


class Driver:
    @staticmethod
    def is_active():
        return True

    def get_current_target(self):
        return SimpleNamespace(backend="cpu", arch=0, warp_size=1)


triton.backends.backends["cpu"] = SimpleNamespace(driver=Driver)
"""


@contextmanager
def model_runner(name: str, python: Path, directory: Path) -> Iterator[Path]:
    """Have the vLLM processes that start meanwhile take V1 or V2, and give the Python that they need.

    Args:
        python: the Python of vLLM's environment, which stays as it is.
        directory: where an environment is made that adds the backend to it, for V2 on a CPU.
    """
    variables = {"VLLM_USE_V2_MODEL_RUNNER": str(int(name == "V2"))}
    if name == "V2" and not torch.cuda.is_available():
        python = _interpreting(python, directory)
        variables |= {"TRITON_INTERPRET": "1", "EAGLE31_VLLM_PYTHON": str(python)}
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in variables.items():
            patch.setenv(variable, value)
        yield python


def _interpreting(python: Path, directory: Path) -> Path:
    environment = python.parent.parent
    [packages] = environment.glob("lib/python3*/site-packages")
    own = directory / packages.relative_to(environment)
    own.mkdir(parents=True)
    (own / "triton_on_cpu.py").write_text(_BACKEND)
    # Python adds the paths in such a file, and runs the lines that import, when it starts.
    (own / "vllm.pth").write_text(f"{packages}\nimport triton_on_cpu\n")
    (directory / "pyvenv.cfg").write_text(f"home = {python.resolve().parent}\n")
    (directory / "bin").mkdir()
    for path in ("bin/python", "lib/libiomp5.so"):
        (directory / path).symlink_to(environment / path)
    return directory / "bin/python"
