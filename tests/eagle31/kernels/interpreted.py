"""The kernels for GPUs, imported so that Triton interprets them on tensors of the CPU.

Triton reads TRITON_INTERPRET when a kernel is defined, so tests import this module before any of the others.
"""

import os
from collections.abc import Callable
from importlib import import_module, reload
from typing import Any
from unittest.mock import patch

import numpy as np
import triton.experimental.gluon  # noqa: F401 - a launch would import it, and refuse what is interpreted
import triton.language as tl
from triton.runtime import interpreter

MODULES = [
    "eagle31.kernels.loss",
    "eagle31.kernels.norm_backward",
    "eagle31.kernels.rollout_terms",
    "eagle31.kernels.rotation",
    "liger_kernel.ops.fused_add_rms_norm",
    "liger_kernel.ops.rms_norm",
    "liger_kernel.ops.swiglu",
]

with patch.dict(os.environ, TRITON_INTERPRET="1"):
    # Its functions, `sum` for example, are kernels too, and something else may have imported them already.
    reload(tl.standard)
    reload(tl)
    for module in MODULES:
        imported = import_module(module)
        if hasattr(imported, "rsqrt"):  # CUDA's, which the interpreter does not have
            vars(imported)["rsqrt"] = lambda x: tl.math.rsqrt(x)


def _as_on_a_gpu(argument: Any, convert: Callable[[Any], Any] = interpreter._implicit_cvt) -> Any:
    """Make a tensor of a number, which the interpreter does with whole numbers alone."""
    if isinstance(argument, float):
        return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
    return convert(argument)


interpreter._implicit_cvt = _as_on_a_gpu
