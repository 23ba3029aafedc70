"""The data of all sides: a target, held-out completions, a draft vocabulary and captured hidden states."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from data.cache import cache_directory
from data.embedded.chat_target import ensure_chat_target
from data.embedded.target import EmbeddedTarget, ensure_embedded_target
from data.store import HiddenStateStore
from data.target.aux_layers import check_aux_layer_ids, default_aux_layer_ids
from data.target.parts import TargetParts, load_target_parts
from data.target.spec import TargetSpec
from eagle31.model.config import DrafterConfig
from eagle31.model.vocab import DraftVocab
from train.bench.peers.environment import ROOT, process_environment
from train.config.compose import composed
from train.config.run import RunConfig
from train.drafter.shape import complete_shape

STAGES = ("data", "answers", "vocab", "capture")
_running: set[subprocess.Popen[bytes]] = set()
_VALIDATION_PROMPTS = 4  # of the trainer's validations, which the benchmark does not use


class RunFailed(RuntimeError):
    """A run ended with an error; the message has the end of its log."""


@dataclass(frozen=True)
class Dataset:
    """What the sides share. All artifacts are in one output directory of eagle31."""

    directory: Path
    overrides: tuple[str, ...]  # of the recipe that made it
    target: Path
    parts: TargetParts

    @property
    def artifacts(self) -> dict[str, Path]:
        """The finished artifacts by stage."""
        found = {}
        for stage in STAGES:
            manifests = self.directory.glob(f"artifacts/{stage}-*/stage.json")
            found[stage] = max(manifests, key=lambda path: path.stat().st_mtime).parent
        return found

    @property
    def tensors(self) -> Path:
        """The target's tensors and the draft vocabulary, in the form of the peers."""
        return self.directory / "target.safetensors"

    def config(self, overrides: Sequence[str]) -> RunConfig:
        """Return the configuration of a run of eagle31 on this data."""
        return composed([*self.overrides, *overrides])

    def drafter(self, config: RunConfig, draft_vocab_size: int) -> DrafterConfig:
        """Return the complete shape of a run's drafter."""
        chosen, num_layers = config.drafter.aux_layer_ids, self.parts.num_layers
        ids = check_aux_layer_ids(chosen, num_layers) if chosen else default_aux_layer_ids(num_layers)
        return complete_shape(config.drafter, self.parts.config, ids, self.parts.vocab_size, draft_vocab_size)

    def describe(self) -> dict[str, Any]:
        """Return the numbers of the data for the report."""
        stages = {
            stage: json.loads((path / "stage.json").read_text()) for stage, path in self.artifacts.items()
        }
        trained = self.target / "training.json"
        return {
            "target": json.loads(trained.read_text()) if trained.exists() else str(self.target),
            "overrides": list(self.overrides),
            "stages": {stage: manifest["facts"] for stage, manifest in stages.items()},
        }


def prepare_dataset(
    output: Path,
    conversations: Path | None,
    extra: Sequence[str],
    *,
    num_samples: int,
    num_prompts: int,
    threads: int,
) -> Dataset:
    """Train the target if needed, and run eagle31's stages up to the captured hidden states.

    Args:
        conversations: JSON lines with `question` and `answer` for the target and the drafters; None for the
            embedded target.
        extra: overrides of the recipe for all sides of eagle31.

    Raises:
        UserError: bad input.
        RunFailed: a stage failed.
    """
    cache = cache_directory() / "embedded"
    if conversations is None:
        target = ensure_embedded_target(cache, num_threads=threads)
    else:
        target = ensure_chat_target(cache, conversations, num_threads=threads)
    overrides = (*dataset_overrides(target, conversations, num_samples, num_prompts), *extra)
    key = hashlib.sha256(json.dumps(overrides).encode()).hexdigest()[:8]
    directory = output / f"data-{key}"
    spec = TargetSpec(model=str(target.model), dtype="float32")
    dataset = Dataset(directory, overrides, target.model, load_target_parts(spec))
    dataset.config(())  # refuses what is wrong before anything runs
    run_eagle31(
        [*overrides, f"output_dir={directory}", f"stages=[{','.join(STAGES)}]"],
        directory / "log.txt",
        threads,
    )
    if not dataset.tensors.exists():
        save_file(target_tensors(dataset), dataset.tensors)
    return dataset


def dataset_overrides(
    target: EmbeddedTarget, conversations: Path | None, num_samples: int, num_prompts: int
) -> list[str]:
    """Return the quickstart's recipe with this target and more samples."""
    overrides = [
        "recipe=quickstart",
        f"data.num_validation={_VALIDATION_PROMPTS}",
        f"data.num_test={num_prompts}",
        f"capture.max_samples={num_samples}",
    ]
    if conversations is not None:
        overrides += [
            "target=hub",
            f"target.model={target.model}",
            "target.dtype=float32",
            f"data.train={target.train}",
            f"data.eval={target.held_out}",
            # The answers in the file are not the target's.
            "data.regenerate.enabled=true",
            "data.regenerate.max_new_tokens=256",
            "data.regenerate.batch_size=64",
        ]
    return overrides


def target_tensors(dataset: Dataset) -> dict[str, torch.Tensor]:
    """Return the target's embedding, head and norm, and the draft vocabulary, named as for `bench/step`."""
    vocab, parts = load_vocab(dataset.artifacts["vocab"]), dataset.parts
    return {
        "target_embed": parts.embed_tokens.float().contiguous(),
        "target_head": parts.head.weight.detach().float().contiguous(),
        "target_norm": parts.head.norm.get_parameter("weight").detach().float().contiguous(),
        "draft_target_ids": vocab.target_ids,
        "draft_d2t": vocab.d2t,
        "draft_t2d": vocab.t2d,
    }


def load_vocab(artifact: Path) -> DraftVocab:
    tensors = load_file(artifact / "vocab.safetensors")
    return DraftVocab(
        tensors["d2t"], tensors["t2d"], json.loads((artifact / "vocab.json").read_text())["coverage"]
    )


def open_test(capture: Path) -> HiddenStateStore:
    """Return the states of the held-out completions that acceptance length is measured on."""
    return HiddenStateStore(capture / "test")


def run_eagle31(arguments: Sequence[str], log: Path, threads: int) -> None:
    """Run train/main.py.

    Raises:
        RunFailed: it ended with an error.
    """
    run_logged([sys.executable, str(ROOT / "train" / "main.py"), *arguments], log, threads)


def end_running() -> None:
    """End the processes of `run_logged` in all threads."""
    for process in list(_running):
        end_process(process)


def end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    _running.discard(process)


def run_logged(command: Sequence[str], log: Path, threads: int) -> None:
    """Run a command whose output goes to `log`; end it if this process is interrupted.

    Raises:
        RunFailed: it ended with an error.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=process_environment(threads),
        )
        _running.add(process)
        try:
            status = process.wait()
        finally:
            end_process(process)
    if status:
        lines = log.read_text(errors="replace").splitlines()[-15:]
        tail = "\n".join(f"  | {line}" for line in lines)
        raise RunFailed(f"{Path(command[1]).name} ended with status {status}.\n{tail}\nThe full log: {log}")
