"""What a run leaves, in a form in which two runs of the same command can be compared."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from data.store import HiddenStateStore
from eagle31.json_files import read_json
from tests.train.small_run import depends_on_time, metrics_of


def outcome_of(run: Path) -> dict[str, object]:
    """Return the samples and their states, the metrics without times, the export and its evaluation."""
    found: dict[str, object] = {}
    for manifest in sorted(run.glob("artifacts/*/*/manifest.json")):
        store = HiddenStateStore(manifest.parent)
        ids = [int(sample_id) for sample_id in store.sample_ids]
        assert len(set(ids)) == len(ids), f"{manifest.parent} has a sample twice"
        for index, sample_id in enumerate(ids):
            sample = store[index]
            states = (
                sample.input_ids,
                sample.loss_mask,
                sample.aux_hidden_states,
                sample.final_hidden_states,
            )
            found[f"{manifest.parent.name} {sample_id}"] = _digest(
                *(state.contiguous().view(torch.uint8).numpy().tobytes() for state in states)
            )
    found["metrics"] = metrics_of(run)
    for path in run.glob("export/*.safetensors"):
        found[path.name] = _digest(path.read_bytes())
    for path in run.glob("artifacts/evaluate-*/evaluation.json"):
        found["evaluation"] = _without_times(read_json(path))
    return found


def leftovers(run: Path) -> list[Path]:
    """Return the files and directories that nothing would ever finish or read."""
    return [
        path for path in run.rglob(".*") if path.name.endswith(".partial") or path.name.startswith(".tmp")
    ]


def _without_times(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_times(v) for k, v in value.items() if not depends_on_time(k)}
    return [_without_times(one) for one in value] if isinstance(value, list) else value


def _digest(*contents: bytes) -> str:
    return hashlib.sha256(b"".join(contents)).hexdigest()
