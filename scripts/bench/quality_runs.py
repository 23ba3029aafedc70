"""Trainings of drafters on the same captured states by eagle31 and by other trainers, and their acceptance.

Everything that is finished is reused by the same command.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.cache import cache_directory
from data.embedded.target import ensure_embedded_target
from data.store import HiddenStateStore
from data.target.aux_layers import check_aux_layer_ids, default_aux_layer_ids
from data.target.parts import TargetParts, load_target_parts
from data.target.spec import TargetSpec
from eagle31.errors import UserError
from eagle31.export.config_json import config_json
from eagle31.export.layouts import Layout
from eagle31.json_files import read_json, write_json
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.model.vocab import DraftVocab
from scripts.bench.chat_target import ensure_chat_target
from scripts.bench.peers.environment import ROOT, find_python, process_environment
from train.artifact import Artifact
from train.config.compose import composed
from train.config.run import RunConfig
from train.drafter.build import build_drafter
from train.drafter.published import open_published
from train.drafter.shape import complete_shape
from train.evaluation.intervals import Floats, Resamples
from train.evaluation.replay import packed, replay_greedily
from train.stages.vocab import load_projected
from train.trainer.parts import STATE, load_weights, read_checked
from train.versions import git_revision

STAGES = ("data", "answers", "vocab", "capture")
Json = dict[str, Any]


class RunFailed(RuntimeError):
    """A run ended with an error; the message has the end of its log."""


@dataclass(frozen=True)
class Side:
    """A trainer with its settings."""

    name: str
    overrides: tuple[str, ...] = ()  # of eagle31's recipe
    is_peer: bool = False


def parse_side(text: str) -> Side:
    """Parse NAME=OVERRIDES, such as `linear=optim.schedule=linear train.step_decay=1.0`.

    Raises:
        UserError: it has no name that can be that of a directory, or no override.
    """
    name, _, rest = text.partition("=")
    overrides = tuple(shlex.split(rest))
    if not re.fullmatch(r"[\w.+-]+", name) or not overrides or not all("=" in one for one in overrides):
        raise UserError("--side", text, 'Give NAME=OVERRIDES, such as "linear=optim.schedule=linear".')
    return Side(name, overrides)


@dataclass(frozen=True)
class Data:
    """What the sides share: a target, held-out completions, a draft vocabulary and captured states."""

    directory: Path  # eagle31's output directory with the artifacts
    overrides: tuple[str, ...]  # of the recipe that made it
    target: Path
    parts: TargetParts

    @property
    def artifacts(self) -> dict[str, Path]:
        """The finished artifacts by stage."""
        found = {stage: self.directory.glob(f"artifacts/{stage}-*/stage.json") for stage in STAGES}
        return {
            stage: max(paths, key=lambda one: one.stat().st_mtime).parent for stage, paths in found.items()
        }

    @property
    def tensors(self) -> Path:
        """The target's tensors and the draft vocabulary, in the form of the peers."""
        return self.directory / "target.safetensors"

    def vocab(self) -> DraftVocab:
        path = self.artifacts["vocab"]
        tensors = load_file(path / "vocab.safetensors")
        return DraftVocab(tensors["d2t"], tensors["t2d"], read_json(path / "vocab.json")["coverage"])

    def config(self, side: Side) -> RunConfig:
        """Return the configuration of a run of eagle31 on this data."""
        return composed([*self.overrides, *side.overrides])

    def drafter(self, config: RunConfig) -> DrafterConfig:
        """Return the complete shape of a run's drafter."""
        chosen, num_layers = config.drafter.aux_layer_ids, self.parts.num_layers
        ids = check_aux_layer_ids(chosen, num_layers) if chosen else default_aux_layer_ids(num_layers)
        size = len(self.vocab().d2t)
        return complete_shape(config.drafter, self.parts.config, ids, self.parts.vocab_size, size)


def prepare_data(
    output: Path,
    conversations: Path | None,
    extra: Sequence[str],
    *,
    num_samples: int,
    num_prompts: int,
    threads: int,
) -> Data:
    """Train the target if needed, and run eagle31's stages up to the captured hidden states.

    Args:
        conversations: JSON lines with `question` and `answer` for the target and the drafters; None for the
            embedded target.
        extra: overrides of the recipe for all sides of eagle31.
    """
    torch.set_num_threads(threads)
    cache = cache_directory() / "embedded"
    overrides = ["recipe=quickstart", "data.num_validation=4", f"data.num_test={num_prompts}"]
    overrides += [f"capture.max_samples={num_samples}"]
    if conversations is None:
        target = ensure_embedded_target(cache)
    else:
        target = ensure_chat_target(cache, conversations)
        overrides += [
            *(f"target.model={target.model}", "target.dtype=float32"),
            *(f"data.train={target.train}", f"data.eval={target.held_out}"),
            # The answers in the file are not the target's.
            "data.regenerate.enabled=true",
            "data.regenerate.max_new_tokens=256",
            "data.regenerate.temperature=0",
            "data.regenerate.batch_size=64",
        ]
    directory = output / ("data-gsm8k" if conversations else "data")
    parts = load_target_parts(TargetSpec(model=str(target.model), dtype="float32"))
    data = Data(directory, (*overrides, *extra), target.model, parts)
    stages = [f"output_dir={directory}", f"stages=[{','.join(STAGES)}]"]
    run_logged([sys.executable, "train/main.py", *data.overrides, *stages], directory / "log.txt", threads)
    if not data.tensors.exists():
        save_file(target_tensors(data), data.tensors)
    return data


def target_tensors(data: Data) -> dict[str, torch.Tensor]:
    """Return the target's embedding, head and norm, and the draft vocabulary, named as for bench/step."""
    vocab, parts = data.vocab(), data.parts
    return {
        "target_embed": parts.embed_tokens.float().contiguous(),
        "target_head": parts.head.weight.detach().float().contiguous(),
        "target_norm": parts.head.norm.get_parameter("weight").detach().float().contiguous(),
        "draft_target_ids": vocab.target_ids,
        "draft_d2t": vocab.d2t,
        "draft_t2d": vocab.t2d,
    }


def run_logged(command: Sequence[str], log: Path, threads: int) -> None:
    """Run a command whose output goes to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        environment = process_environment(threads)
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise RunFailed(f"{command[1]} ended with status {done.returncode}.\n{tail}\nThe full log: {log}")


@dataclass(frozen=True)
class Run:
    """A training of a side, whose schedule ends at its last step, and its directory."""

    side: Side
    steps: int
    keep_every: int
    seed: int
    threads: int
    runs: Path

    @property
    def directory(self) -> Path:
        return self.runs / f"{self.side.name}-{self.steps}-seed{self.seed}"


def trained(data: Data, run: Run) -> Json:
    """Return the result of a run: `kept` has its weights with steps, seconds and supervised positions."""
    path = run.directory / "run.json"
    spec = json.loads(json.dumps(asdict(run) | {"overrides": data.overrides}, default=str))
    if path.exists() and read_json(path)["spec"] == spec:
        found: Json = read_json(path)
        return found
    shutil.rmtree(run.directory, ignore_errors=True)
    run.directory.mkdir(parents=True)
    print(f"training {run.directory.name}", file=sys.stderr, flush=True)
    result = (_train_peer if run.side.is_peer else _train_eagle31)(data, run)
    result |= {"spec": spec, "git_revision": git_revision()}
    write_json(path, result)
    return result


def _train_eagle31(data: Data, run: Run) -> Json:
    directory = run.directory
    (directory / "artifacts").mkdir()
    for path in data.artifacts.values():
        (directory / "artifacts" / path.name).symlink_to(os.path.abspath(path))
    line = [
        *(sys.executable, "train/main.py", *data.overrides, *run.side.overrides),
        f"output_dir={directory}",
        f"stages=[{','.join((*STAGES, 'train'))}]",
        f"train.max_steps={run.steps}",
        f"train.save_every={run.keep_every}",
        # A checkpoint has the seconds of the steps up to the last record.
        f"train.log_every={run.keep_every}",
        f"train.keep_checkpoints={run.steps}",
        f"train.validate_every={run.steps}",
        f"train.seed={run.seed}",
    ]
    run_logged(line, directory / "log.txt", run.threads)
    (artifact,) = (path.parent for path in directory.glob("artifacts/train-*/stage.json"))
    kept = []
    for path in sorted(artifact.glob("checkpoints/step-*")):
        state = read_checked(path / STATE)
        figures = {name: state[name] for name in ("step", "step_seconds", "supervised_positions")}
        kept.append(figures | {"checkpoint": str(path.relative_to(directory))})
    return {"kept": kept, "artifact": str(artifact.relative_to(directory))}


def _train_peer(data: Data, run: Run) -> Json:
    config = data.config(Side(""))
    drafter = data.drafter(config)
    llama = {
        "hidden_size": drafter.hidden_size,
        "intermediate_size": drafter.intermediate_size,
        "num_attention_heads": drafter.num_attention_heads,
        "num_key_value_heads": drafter.num_key_value_heads,
        "head_dim": drafter.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": drafter.vocab_size,
        "max_position_embeddings": drafter.max_position_embeddings,
        "rms_norm_eps": drafter.rms_norm_eps,
        "rope_parameters": dict(drafter.served_rope),
    }
    worker = {
        "peer": run.side.name,
        "store": str(data.artifacts["capture"] / "train"),
        "target": str(data.target),
        "tensors": str(data.tensors),
        "llama_config": llama,
        "published_config": config_json(drafter, Layout.vllm, "float32"),
        "draft_vocab_size": drafter.draft_vocab_size,
        "aux_layer_ids": list(drafter.aux_layer_ids),
        "row_tokens": config.train.row_tokens,
        "rows_per_step": config.train.rows_per_step,
        "steps": run.steps,
        "keep_every": run.keep_every,
        "seed": run.seed,
        "threads": run.threads,
        "output": str(run.directory),
    }
    write_json(run.directory / "worker.json", worker)
    line = [str(find_python(run.side.name)), "-I", str(ROOT / "scripts/bench/quality_peer.py")]
    run_logged([*line, str(run.directory / "worker.json")], run.directory / "log.txt", run.threads)
    result: Json = read_json(run.directory / "result.json")
    return result


def measured(data: Data, run: Run, result: Json) -> dict[str, Json]:
    """Return, for each kept step, `drafts` and `accepted` by draft length and held-out prompt, by replay."""
    path = run.directory / "acceptance.json"
    if path.exists():
        found: dict[str, Json] = read_json(path)
        return found
    capture = data.artifacts["capture"]
    own = None
    if not run.side.is_peer:
        inputs = Artifact("train", {}, run.directory / result["artifact"]).manifest["inputs"]
        capture = run.directory / "artifacts" / inputs["capture"]
        own = _own_drafter(data, run.side, load_projected(run.directory / result["artifact"]))
    store = HiddenStateStore(capture / "test")
    rows = list(packed(store[index] for index in range(len(store))))
    counts = {}
    for kept in result["kept"]:
        checkpoint = run.directory / kept["checkpoint"]
        if own is not None:
            drafter, frozen = own
            drafter.load_state_dict(load_weights(checkpoint))
        else:
            loaded = open_published(checkpoint, data.parts, None, "checkpoint")
            ids = loaded.draft_target_ids
            drafter, frozen = loaded.drafter, FrozenParts(loaded.embed_tokens, data.parts.head, ids, None)
        counts[str(kept["step"])] = replay_greedily(drafter, frozen, rows).counts()
    write_json(path, counts)
    return counts


def _own_drafter(data: Data, side: Side, projected: dict[str, Tensor]) -> tuple[Drafter, FrozenParts]:
    config = data.config(side)
    drafter, frozen = build_drafter(
        data.drafter(config),
        data.vocab(),
        data.parts,
        None,
        projected,
        train_lm_head=config.drafter.train_lm_head,
        seed=0,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    return drafter.requires_grad_(False), frozen


def acceptance_lengths(drafts: Floats, accepted: Floats, resamples: Resamples) -> Floats:
    """Return the mean over seeds; each resample draws seeds and prompts. [S, P] -> [1 + B]"""
    lengths = 1 + (resamples.prompts @ accepted.T) / (resamples.prompts @ drafts.T).clip(min=1)  # [1 + B, S]
    seeds = len(drafts)
    drawn = np.random.default_rng([resamples.seed, seeds]).integers(seeds, size=(resamples.num, seeds))
    chosen: NDArray[np.int64] = np.vstack([np.arange(seeds), drawn])
    mean: Floats = np.take_along_axis(lengths, chosen, axis=1).mean(axis=1)
    return mean


def minutes_until(minutes: Floats, lengths: Floats, level: float) -> float:
    """Return when a curve first has a level, by linear interpolation from (0, 1); infinity if never. [C]"""
    x, y = np.concatenate([[0.0], minutes]), np.concatenate([[1.0], lengths])
    reached = np.flatnonzero(y >= level)
    if not len(reached):
        return float("inf")
    after = int(reached[0])
    if after == 0:
        return 0.0
    share = (level - y[after - 1]) / (y[after] - y[after - 1])
    return float(x[after - 1] + share * (x[after] - x[after - 1]))
