"""The parts of the check, in the order in which they run."""

from collections.abc import Mapping
from dataclasses import dataclass, field

_MODULES = "train.bench.gpu_check.parts"
# On a CPU, resident memory is a step's own only where freed memory is returned at once and oneDNN keeps no
# repacked copies of bf16 weights.
_MEASURED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "262144",
    "MALLOC_ARENA_MAX": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}


@dataclass(frozen=True)
class Part:
    """One part of the check; its module has `run(options, record)`."""

    name: str
    title: str
    module: str
    seconds: float  # the part is ended after this time
    gpus: int = 1  # a dry run needs none
    environment: Mapping[str, str] = field(default_factory=dict)  # added to that of the check


PARTS = (
    Part("environment", "The machine and its packages", f"{_MODULES}.environment", 60),
    Part("parity", "The step against the reference", f"{_MODULES}.parity", 180),
    Part(
        "hidden_4096",
        "The step at hidden size 4096 (Llama 3.1 8B)",
        f"{_MODULES}.hidden_4096",
        180,
        environment=_MEASURED_MEMORY,
    ),
    Part(
        "kimi_k2_6",
        "The step at Kimi K2.6's shape",
        f"{_MODULES}.kimi_k2_6",
        240,
        environment=_MEASURED_MEMORY,
    ),
    Part("quickstart", "The quickstart in bf16 with ZeRO 1", f"{_MODULES}.quickstart", 420),
    Part("resume", "Training that is killed and resumed", f"{_MODULES}.resume", 240),
    Part("export", "The export, checked and evaluated", f"{_MODULES}.export", 180),
    Part("capture", "Capture in vLLM against transformers", f"{_MODULES}.capture", 300),
    Part("serving", "The export in vLLM against eagle31's evaluator", f"{_MODULES}.serving", 300),
    Part("two_ranks", "Training on two ranks", f"{_MODULES}.two_ranks", 240, gpus=2),
    Part(
        "tensor_parallel",
        "Capture in vLLM with tensor parallel 2",
        f"{_MODULES}.tensor_parallel",
        300,
        gpus=2,
    ),
    # Last: it takes minutes to compile, and must not take them from the other parts.
    Part("compiled", "The step with train.compile and without", f"{_MODULES}.compiled", 300),
)
