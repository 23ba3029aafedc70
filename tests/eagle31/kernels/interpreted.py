"""The kernels for GPUs, imported so that Triton interprets them on tensors of the CPU.

Triton reads TRITON_INTERPRET when a kernel is defined, so tests import this module before any of the others.
"""

import os
from importlib import import_module, reload
from unittest.mock import patch

import triton.experimental.gluon  # a launch would import it, and refuse what is interpreted
import triton.language

MODULES = [
    "eagle31.kernels.loss",
]

with patch.dict(os.environ, TRITON_INTERPRET="1"):
    # Its functions, `sum` for example, are kernels too, and something else may have imported them already.
    reload(triton.language.standard)
    reload(triton.language)
    for module in MODULES:
        import_module(module)
