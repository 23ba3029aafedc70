"""What a run leaves, in a form in which two runs of the same command can be compared."""

import hashlib
import json
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from data.store import HiddenStateStore
from data.store.shards import FinishedShards
from eagle31.json_files import read_json, read_jsonl
from tests.train.reporting.hub_server import Hub
from tests.train.small_run import depends_on_time

# Pictures and pages with times; what they show is in JSON files that are compared.
_SHOWN = (".png", ".html", ".md")
_LOCKS = (".lock", ".writer-")
_CACHES = "cache-*.arrow"  # of the datasets library, named by chance
# Times, and checksums of files that have times; the files are compared themselves.
_TIMED = {
    "checksum",
    "files",
    "seconds",
    "finished_at",
    "started_at",
    "hours",
    "crc32",
    "speed",
    "speed_up",
    "timing",
    "stages",
}
# What depends on how samples are divided between shards, on chance, or on commits made in the meantime.
_BY_CHANCE = {"num_bytes", "num_shards", "index_checksum", "_fingerprint", "git_revision"}


def outcome_of(output: Path, hub: Hub, repo: str) -> dict[str, str]:
    """Return the files of a run, by path, with what must be the same in each run of the same command.

    A store counts as its samples, whatever shards hold them. Times are left out.
    """
    found: dict[str, str] = {}
    stores = [path.parent for path in output.glob("artifacts/*/*/manifest.json")]
    for store in stores:
        found |= _samples(store, output)
    for path in sorted(output.rglob("*")):
        name = path.relative_to(output).as_posix()
        in_store = path.parent in stores and (path.name.startswith("shard-") or path.suffix == ".safetensors")
        if path.is_symlink():
            found[name] = f"to {path.readlink()}"
        elif path.is_file() and not (in_store or path.name.startswith(_LOCKS) or path.match(_CACHES)):
            found[name] = _content(path, output)
    for message, files in hub.commits.get(repo, []):
        for name, content in files.items():
            if not name.endswith(_SHOWN):
                found[f"hub/{name}"] = _digest(content)
        found["hub"] = message
    found["hub/commits"] = str(len(hub.commits.get(repo, [])))
    return found


def differences(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Return what differs, a line for each file."""
    lines = []
    for name in sorted(found.keys() | expected.keys()):
        if name not in expected:
            lines.append(f"{name} is left over")
        elif name not in found:
            lines.append(f"{name} is missing")
        elif found[name] != expected[name]:
            same = _num_equal(found[name], expected[name])
            shown = slice(max(0, same - 100), same + 100)
            lines.append(f"{name} differs: {found[name][shown]} instead of {expected[name][shown]}")
    return lines


def _num_equal(one: str, other: str) -> int:
    """Return with how many equal characters two strings begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _samples(directory: Path, output: Path) -> dict[str, str]:
    """Return a digest of each sample's states; a sample that two shards hold is named."""
    store = HiddenStateStore(directory)
    store.verify()
    name = directory.relative_to(output).as_posix()
    written = [sample for record in FinishedShards(directory).records() for sample in record.sample_ids]
    doubled = sorted({sample for sample in written if written.count(sample) > 1})
    found = {f"{name}/doubled": str(doubled)}
    for index, sample_id in enumerate(store.sample_ids):
        sample = store[index]
        tensors = (sample.input_ids, sample.loss_mask, sample.aux_hidden_states, sample.final_hidden_states)
        content = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
        found[f"{name}/sample {int(sample_id)}"] = _digest(content)
    return found


def _content(path: Path, output: Path) -> str:
    if path.name == "metrics.jsonl":
        return json.dumps([_without_times(record) for record in read_jsonl(path)])
    if path.suffix == ".jsonl":
        return json.dumps(read_jsonl(path))
    if path.suffix == ".json":
        return json.dumps(_without_times(read_json(path))).replace(str(output), "OUTPUT")
    if path.suffix == ".pt":
        return _digest(_tensors(torch.load(path, map_location="cpu", weights_only=False)))
    if path.suffix in _SHOWN:
        return "a picture or a page"
    return _digest(path.read_bytes().replace(str(output).encode(), b"OUTPUT"))


def _without_times(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _without_times(one)
            for name, one in value.items()
            if name not in _TIMED | _BY_CHANCE and not depends_on_time(name)
        }
    return [_without_times(one) for one in value] if isinstance(value, list) else value


def _tensors(value: Any) -> bytes:
    """Return all numbers of a nested checkpoint, in its order."""
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, Mapping):
        return b"".join(str(name).encode() + _tensors(one) for name, one in value.items())
    if isinstance(value, list | tuple):
        return b"".join(_tensors(one) for one in value)
    return str(value).encode() if isinstance(value, bool | int | float | str) else b""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
