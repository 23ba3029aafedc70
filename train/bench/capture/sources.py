"""The sources of hidden states, and the sides that run the target with transformers in this process."""

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from functools import partial
from io import StringIO

import torch
from torch import nn

from data.capture.hf import HiddenStateCapture
from data.capture.offline import batches_by_length, capture_to_store
from data.capture.opening import StoreSpec
from data.capture.tokens import TokenRows, dataset_lengths
from data.store.codec import Encoding
from data.target.loading import load_target
from data.target.modules import locate
from train.bench.capture.timing import PREFILL, OpenSource, RunSide, Task, Timing
from train.bench.capture.vllm_sides import open_vllm


@contextmanager
def open_hf(task: Task) -> Iterator[Mapping[str, RunSide]]:
    """Yield the sides; plain prefill runs the decoder on capture's batches, and no side runs the lm_head."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_target(task.spec, device)
    capture = HiddenStateCapture(model, locate(model, task.spec), task.aux_layer_ids)
    sides = {encoding.codec: partial(_capture, task, capture, encoding) for encoding in task.encodings}
    yield {PREFILL: partial(_prefill, task, capture), **sides}


SOURCES: dict[str, OpenSource] = {"hf": open_hf, "vllm": open_vllm}


@torch.inference_mode()
def _prefill(task: Task, capture: HiddenStateCapture) -> Timing:
    start = _now()
    tokens = TokenRows(task.dataset)
    for indices in batches_by_length(dataset_lengths(task.dataset), task.batch_tokens):
        ids = [input_ids for input_ids, _ in tokens.read(indices)]
        padded = nn.utils.rnn.pad_sequence(ids, batch_first=True).to(capture.device)
        capture.modules.decoder(input_ids=padded, use_cache=False)
    if capture.device.type == "cuda":
        torch.cuda.synchronize(capture.device)
    return _since(start)


def _capture(task: Task, capture: HiddenStateCapture, encoding: Encoding) -> Timing:
    """Time a capture from an empty directory to a finished store."""
    directory = task.scratch / "store"
    start = _now()
    with redirect_stderr(StringIO()):
        capture_to_store(
            StoreSpec(directory, task.dataset, encoding),
            capture,
            shard_tokens=task.shard_tokens,
            batch_tokens=task.batch_tokens,
            manifest_fields={},
        )
    timing = _since(start)
    shutil.rmtree(directory)
    return timing


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(start: tuple[float, float]) -> Timing:
    wall, cpu = _now()
    return Timing(wall - start[0], cpu - start[1])
