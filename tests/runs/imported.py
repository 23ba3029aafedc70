"""Imports, once for all workers and runs, what they import of libraries."""

import gc
from importlib import import_module

MODULES = (
    "train.pipeline",
    "data.capture.hf",
    "data.generation.hf",
    "transformers.models.qwen3.modeling_qwen3",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # which DeepSpeed imports for any optimizer
    "hypothesis",
    "xdist.remote",
)

gc.disable()  # nothing of it is garbage
for name in MODULES:
    import_module(name)
gc.freeze()
gc.enable()
