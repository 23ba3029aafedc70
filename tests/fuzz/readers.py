"""The readers of the files that eagle31 writes and downloads, each with a valid file to begin from."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from data.store import HiddenStateStore
from data.store.shards import open_shard, read_sidecar
from eagle31.errors import UserError
from eagle31.export.layouts import read_raw_config
from eagle31.export.published_config import read_config
from eagle31.export.verification import read_probe, read_record
from eagle31.json_files import read_json, read_jsonl, read_sealed_json, write_sealed_json
from eagle31.tensor_files import load_pickled_tensors, load_tensors, map_tensors, read_header
from tests.data.store.samples import write_store
from tests.train.drafter.tiny_export import save_target_with_tokenizer, write_tiny_export
from train.artifact import Artifact
from train.reporting.draft_length import read_step_times
from train.reporting.results import read_report, read_serving

DOCUMENTED = (UserError, OSError)  # what a reader may raise, whatever the file


@dataclass(frozen=True)
class Reader:
    """A reader of one file: where the file is in its directory, a valid content, and the call."""

    file: str
    content: bytes
    read: Callable[[Path], object]  # given the directory

    def run(self, directory: Path, content: bytes) -> bool:
        """Read a content; return whether it was accepted. Any error but `DOCUMENTED` is one of the reader."""
        path = directory / self.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        try:
            self.read(directory)
        except DOCUMENTED:
            return False
        return True


def _header(directory: Path) -> object:
    with (directory / "file").open("rb") as file:
        return read_header(file, "file")


def _store(directory: Path) -> object:
    store = HiddenStateStore(directory)
    store.verify()
    return [store[index] for index in range(len(store))]


def _artifact(directory: Path) -> object:
    artifact = Artifact("data", {}, directory)
    return artifact.finished and (artifact.summary, artifact.damage())


def readers(directory: Path) -> dict[str, Reader]:
    """Return the readers by name; a directory of valid files is made for them."""
    with tempfile.TemporaryDirectory() as scratch:
        spec = save_target_with_tokenizer(Path(scratch) / "target")
        write_tiny_export(directory, spec)
    write_store(directory)
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bool)}
    save_file(tensors, directory / "file", {"format": "pt"})
    torch.save(tensors, directory / "file.bin")
    (directory / "file.jsonl").write_text('{"kind": "train", "step": 1}\n{"kind": "train", "step": 2}\n')
    evaluation = {"format": 2, "k": 4, "trained": {"by_draft_length": []}}
    write_sealed_json(
        directory / "report" / "metrics.json", {"evaluation": evaluation, "run": {}, "metrics": []}
    )
    write_sealed_json(directory / "report" / "serving.json", {"format": 2, "export": "x", "rows": []})
    times = {"format": 1, "source": "x", "export": "x", "times": []}
    write_sealed_json(directory / "report" / "step_times.json", times)
    Artifact("data", {}, directory).finish(1.0, {"num_samples": 2}, ("file", "file.jsonl"))
    calls: dict[str, tuple[str, Callable[[Path], object]]] = {
        "header": ("file", _header),
        "tensors": ("file", lambda d: load_tensors(d / "file")),
        "mapped": ("file", lambda d: map_tensors(d / "file")),
        "pickled": ("file.bin", lambda d: load_pickled_tensors(d / "file.bin")),
        "json": ("report/metrics.json", lambda d: read_json(d / "report" / "metrics.json")),
        "sealed": ("report/metrics.json", lambda d: read_sealed_json(d / "report" / "metrics.json")),
        "jsonl": ("file.jsonl", lambda d: read_jsonl(d / "file.jsonl")),
        "report": ("report/metrics.json", read_report),
        "serving": ("report/serving.json", read_serving),
        "step_times": ("report/step_times.json", read_step_times),
        "artifact": ("stage.json", _artifact),
        "shard": (
            "shard-a-00000.safetensors",
            lambda d: open_shard(d / "shard-a-00000.safetensors").checksums(),
        ),
        "sidecar": ("shard-a-00000.json", lambda d: read_sidecar(d / "shard-a-00000.json")),
        "store_manifest": ("manifest.json", _store),
        "store_index": ("index.safetensors", _store),
        "store_shard": ("shard-b-00000.safetensors", _store),
        "config": ("config.json", lambda d: read_config(read_raw_config(d), num_target_layers=6)),
        "record": ("verification/record.json", read_record),
        "probe": ("verification/probe.safetensors", read_probe),
    }
    found = {}
    for name, (file, read) in calls.items():
        found[name] = Reader(file, (directory / file).read_bytes(), read)
    assert json.loads(found["config"].content)
    return found
