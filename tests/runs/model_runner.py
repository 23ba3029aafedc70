"""vLLM's Model Runner V2, which a GPU takes by default, on the CPU.

V2 needs Triton. vLLM's environment has the package, whose interpreter runs kernels on CPU tensors; vLLM asks
for a backend of the name "cpu" as well, which the package lacks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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
def interpreted_v2(python: Path, directory: Path) -> Iterator[Path]:
    """Have vLLM take V2 in the processes that start meanwhile, and give the Python that they need.

    It is that of an environment that adds the backend to vLLM's.

    Args:
        python: the Python of vLLM's environment, which stays as it is.
        directory: where the environment is made, a new directory.
    """
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
    variables = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (variables | {"EAGLE31_VLLM_PYTHON": str(directory / "bin/python")}).items():
            patch.setenv(name, value)
        yield directory / "bin/python"
