"""Capture in vLLM with tensor parallel 2, against the hidden states of transformers."""

import os

from train.bench.gpu_check.parts.capture import compare
from train.bench.gpu_check.record import Options, Record


def run(options: Options, record: Record) -> None:
    if not options.num_gpus:
        # On a CPU, vLLM refuses two workers on one NUMA node unless their cores are given.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    compare(options, record, "tensor_parallel", "vllm.engine_args.tensor_parallel_size=2")
