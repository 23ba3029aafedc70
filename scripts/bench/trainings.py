"""Trainings of drafters on the same captured states, by eagle31 and by other trainers, and their acceptance.

All that is made for one target is in one directory, where the same command reuses what is finished.
"""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from data.capture.hf import open_capture
from data.conversations.perturbation import PromptSetting
from data.conversations.schemas import Conversation
from data.sampling import Sampling
from data.store import HiddenStateStore
from data.target.parts import TargetParts
from eagle31.errors import UserError
from eagle31.export.config_json import config_json
from eagle31.export.layouts import Layout
from eagle31.json_files import read_json, write_json
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.model.vocab import DraftVocab
from eagle31.training.batch import PackedBatch
from scripts.bench.peers import PEERS, ROOT, drafter_spec, find_python
from train.artifact import Artifact
from train.config.compose import composed
from train.config.run import Stage
from train.context import RunContext
from train.distributed import World
from train.drafter.build import build_drafter
from train.drafter.published import open_published
from train.evaluation.completing import CompletingTarget, packed
from train.evaluation.intervals import Floats, Interval
from train.evaluation.matrix import Cell, complete_cells, parse_sources, prompt_source, render_cells
from train.evaluation.replay import MAX_DRAFT_TOKENS, replay_greedily
from train.pipeline import STAGES
from train.stages.building import step_dtype
from train.stages.vocab import load_projected, load_vocab
from train.trainer.checkpoint_files import STATE, load_weights, read_checked

TARGETS = {"embedded": "quickstart", "smollm2_135m": "smollm2_135m"}  # and their recipes
COLUMNS = ((0, 4), (0, 7), (1, 4), (1, 7))  # temperatures of the target, and tokens per draft
PROMPTS = 32  # of each source of held-out prompts
NUM_RESAMPLES = 1000
POINTS = 6  # checkpoints that a training keeps
# Steps of a run that is timed, and its checkpoints: few, because eagle31 computes metrics before each.
TIMED_STEPS, TIMED_POINTS = 24, 2
SHARED = (Stage.data, Stage.vocab, Stage.answers, Stage.capture)
_CPU = torch.device("cpu")
Json = dict[str, Any]
Rows = list[PackedBatch]


class RunFailed(RuntimeError):
    """A run ended with an error; the message has the end of its log."""


@dataclass(frozen=True)
class Side:
    """A peer with settings of its training, or eagle31 with overrides of its recipe."""

    name: str
    overrides: tuple[str, ...] = ()

    @property
    def is_peer(self) -> bool:
        return self.name in PEERS

    @property
    def label(self) -> str:
        return " ".join([self.name, *self.overrides]) if self.is_peer else self.name


def new_parser(description: str | None, known: Mapping[str, Sequence[str]]) -> argparse.ArgumentParser:
    """Return the arguments that quality and study share; `parse_side` reads the sides."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--sides",
        nargs="+",
        default=list(known),
        metavar="NAME[=OVERRIDES]",
        help=f"of {', '.join(known)} (default: all),\n"
        'or eagle31 with other settings, such as "cosine=optim.schedule=cosine train.seed=1",\n'
        'or a peer with others: "speculators=rate=3" has three times its learning rates',
    )
    parser.add_argument("--target", choices=list(TARGETS), default="embedded", help="(default: embedded)")
    parser.add_argument(
        "--held-out",
        nargs="+",
        default=[],
        metavar="[NAME=]FILE",
        help="prompts on which acceptance is measured, each file apart (default: those of the recipe)",
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="of eagle31 (default: 0 1 2)"
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of every side's recipe")
    return parser


def parse_side(text: str, known: Mapping[str, Sequence[str]]) -> Side:
    """Parse NAME or NAME=OVERRIDES, such as `linear=optim.schedule=linear train.step_decay=1.0`.

    Raises:
        UserError: it has neither a known name nor overrides.
    """
    name, _, rest = text.partition("=")
    overrides = tuple(shlex.split(rest)) if rest else known.get(text)
    if overrides is None or not re.fullmatch(r"[\w.+-]+", name) or not all("=" in one for one in overrides):
        remedy = f'Give one of {", ".join(known)}, or NAME=OVERRIDES, such as "linear=optim.schedule=linear".'
        raise UserError("--sides", text, remedy)
    if name in PEERS:
        for one in overrides:
            if not re.fullmatch(r"(rate|ttt_steps|step_decay)=\d+(\.\d+)?", one):
                raise UserError("--sides", text, "A peer has the numbers rate, ttt_steps and step_decay.")
    return Side(name, tuple(overrides))


@dataclass(frozen=True)
class Data:
    """What the sides share: eagle31's output directory, and the overrides of the recipe that fills it."""

    directory: Path
    overrides: tuple[str, ...]

    def context(self, *overrides: str) -> RunContext:
        """Return a run of eagle31 on this data, with the places of its results."""
        context = RunContext(composed([*self.overrides, *overrides]), World(0, 0, 1))
        for stage in (*SHARED, Stage.train):
            inputs = STAGES[stage].inputs(context)
            artifact = Artifact.locate(self.directory / "artifacts", stage.value, inputs)
            context.artifacts[stage] = artifact
        return context

    def run(self, *overrides: str, stages: Sequence[Stage]) -> None:
        chosen = f"stages=[{','.join(stage.value for stage in stages)}]"
        command = [sys.executable, "train/main.py", *self.overrides, *overrides, chosen]
        run_logged(command, self.directory / "log.txt")


def prepare_data(arguments: argparse.Namespace, *extra: str) -> Data:
    """Run eagle31's stages up to the captured hidden states.

    Args:
        arguments: of `new_parser`.
        extra: overrides of the recipe for all sides of eagle31.
    """
    directory = Path("outputs/bench").resolve() / arguments.target
    overrides = [f"recipe={TARGETS[arguments.target]}", f"output_dir={directory}", "data.num_validation=4"]
    overrides += ["data.num_test=64", "data.max_samples=6000"]
    if arguments.target == "smollm2_135m":
        setup = subprocess.run(
            [ROOT / "scripts/setup/smollm2"], stdout=subprocess.PIPE, text=True, check=True
        )
        overrides.append(f"target.model={setup.stdout.strip()}")
    data = Data(directory, (*overrides, *extra, *arguments.set))
    data.run(stages=SHARED)
    return data


def run_logged(command: Sequence[str], log: Path) -> None:
    """Run a command whose output goes to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT)
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise RunFailed(f"{command[1]} ended with status {done.returncode}.\n{tail}\nThe full log: {log}")


@dataclass(frozen=True)
class Kept:
    """A kept checkpoint of a training."""

    step: int
    step_seconds: float  # of the steps so far with their data
    supervised_positions: int
    checkpoint: str


def trained(
    data: Data, side: Side, steps: int, seed: int = 0, points: int = POINTS
) -> tuple[RunContext, list[Kept]]:
    """Train a side, whose schedule ends at the last step; return the run and its checkpoints."""
    every = -(-steps // points)
    context = data.context() if side.is_peer else data.context(*eagle31_overrides(side, steps, seed, every))
    artifact = context.artifacts[Stage.train]
    print(f"{side.label}, {steps} steps, seed {seed}", file=sys.stderr, flush=True)
    if side.is_peer:
        return context, _train_peer(data.directory / f"{side.label}-{steps}", context, side, steps, every)
    if not artifact.finished:
        data.run(*eagle31_overrides(side, steps, seed, every), stages=(*SHARED, Stage.train))
    kept = []
    for path in sorted((artifact.directory / "checkpoints").glob("step-*")):
        state = read_checked(path / STATE)
        kept.append(Kept(state["step"], state["step_seconds"], state["supervised_positions"], str(path)))
    return context, kept


def seconds_per_step(data: Data, side: Side) -> float:
    """Return how long a step of the side takes with its data, where other work disturbs it least."""
    first, last = trained(data, side, TIMED_STEPS, points=TIMED_POINTS)[1]
    return min(
        first.step_seconds / first.step, (last.step_seconds - first.step_seconds) / (last.step - first.step)
    )


def eagle31_overrides(side: Side, steps: int, seed: int, every: int) -> list[str]:
    return [
        *(f"train.seed={seed}", *side.overrides),
        *(f"train.max_steps={steps}", f"train.validate_every={steps}", f"train.keep_checkpoints={steps}"),
        # A checkpoint has the seconds of the steps up to the last record.
        *(f"train.save_every={every}", f"train.log_every={every}"),
    ]


def _train_peer(directory: Path, context: RunContext, side: Side, steps: int, every: int) -> list[Kept]:
    vocab, config = load_vocab(context.artifacts[Stage.vocab]), context.config
    drafter = context.drafter.config(len(vocab.d2t))
    spec = drafter_spec(drafter) | {
        "peer": side.name,
        "store": str(context.artifacts[Stage.capture].directory / "train"),
        "target": context.target.spec.model,
        "published_config": config_json(drafter, Layout.vllm, "float32"),
        "dtype": str(step_dtype(config)).removeprefix("torch."),
        "row_tokens": config.train.row_tokens,
        "rows_per_step": config.train.rows_per_step,
        "steps": steps,
        "keep_every": every,
        "threads": torch.get_num_threads(),
    }
    spec |= {key: json.loads(value) for key, value in (one.split("=") for one in side.overrides)}
    finished = directory / "kept.json"
    if not finished.exists() or read_json(directory / "spec.json") != spec:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        write_json(directory / "spec.json", spec)
        save_file(target_tensors(context.target.parts, vocab), directory / "target.safetensors")
        worker = ROOT / "scripts/bench/quality_peer.py"
        run_logged([str(find_python(side.name)), "-I", str(worker), str(directory)], directory / "log.txt")
    return [Kept(**one) for one in read_json(finished)]


def target_tensors(parts: TargetParts, vocab: DraftVocab) -> dict[str, Tensor]:
    """Return the target's embedding, head and norm, and the draft vocabulary, named as for bench/step."""
    return {
        "target_embed": parts.embed_tokens.float().contiguous(),
        "target_head": parts.head.weight.detach().float().contiguous(),
        "target_norm": parts.head.norm.get_parameter("weight").detach().float().contiguous(),
        "draft_target_ids": vocab.target_ids,
        "draft_d2t": vocab.d2t,
        "draft_t2d": vocab.t2d,
    }


def read_held_out(sources: Sequence[str]) -> dict[str, list[Conversation]]:
    """Return the conversations of each [NAME=]FILE by name. Raise UserError for what cannot be read."""
    found = parse_sources(sources, prompt_source("--held-out"))
    return {name: list(source.reader()) for name, source in found.items()}


def held_out_rows(data: Data, sources: dict[str, list[Conversation]]) -> dict[str, dict[int, Rows]]:
    """Return the target's completions of held-out prompts, and its states, by source and temperature.

    Args:
        sources: of `read_held_out`; without any, the prompts that the data holds out.
    """
    context = data.context()
    target, config = context.target, context.config
    capture = open_capture(target.spec, target.parts, context.drafter.aux_layer_ids, _CPU)
    completing = CompletingTarget(capture, target.parts.fingerprint, batch_size=32)
    if sources:
        cells, left_out = render_cells(
            sources,
            [PromptSetting()],
            target.tokenizer,
            config.data.template_kwargs,
            num_prompts=PROMPTS,
            max_prompt_tokens=config.data.max_tokens,
            seed=0,
        )
        for name, reason in left_out.items():
            raise UserError("--held-out", name, reason)
    else:
        store = HiddenStateStore(context.artifacts[Stage.capture].directory / "test")
        samples = [store[index] for index in range(len(store))]
        prompts = [one.input_ids[: int(one.loss_mask.nonzero()[0])].tolist() for one in samples]
        cells = [Cell("held out", PromptSetting(), tuple(map(str, range(len(prompts)))), tuple(prompts))]
    rows: dict[str, dict[int, Rows]] = {cell.domain: {} for cell in cells}
    for temperature in sorted({temperature for temperature, _ in COLUMNS}):
        sampling = Sampling(config.evaluate.max_new_tokens, target.eos_token_ids, float(temperature), 0)
        output = data.directory / f"completions-{temperature}.jsonl"
        for cell in complete_cells(cells, completing, sampling, output, max(k for _, k in COLUMNS)):
            rows[cell.domain][temperature] = list(packed(cell.samples(completing)))
    return rows


def measured(
    context: RunContext, side: Side, kept: Kept, rows: Rows, longest: int = MAX_DRAFT_TOKENS
) -> tuple[Floats, Floats]:
    """Return the drafts and the accepted tokens by draft length and held-out prompt, by replay. [K, P]

    Drafts are greedy, as vLLM's are by default, whichever way the target chose its tokens.
    """
    counts = replay_greedily(*loaded(context, side, kept), rows, longest).counts()
    return np.array(counts["drafts"], float), np.array(counts["accepted"], float)


def loaded(context: RunContext, side: Side, kept: Kept) -> tuple[Drafter, FrozenParts]:
    """Return the drafter of a checkpoint, in float32."""
    parts, artifacts = context.target.parts, context.artifacts
    if side.is_peer:
        found = open_published(Path(kept.checkpoint), parts, None, "checkpoint")
        return found.drafter, FrozenParts(found.embed_tokens, parts.head, found.draft_target_ids, None)
    vocab = load_vocab(artifacts[Stage.vocab])
    projected = load_projected(artifacts[Stage.train].directory)
    drafter, frozen = build_drafter(context.config, context.drafter, vocab, projected, _CPU, torch.float32)
    drafter.load_state_dict(load_weights(kept.checkpoint))
    return drafter, frozen


def end_lengths(
    side: Side, runs: Sequence[tuple[RunContext, list[Kept]]], rows: Mapping[int, Rows]
) -> dict[tuple[int, int], Floats]:
    """Return the acceptance lengths of the last checkpoints by column, as `lengths_of`.

    Args:
        rows: completions by temperature.
    """
    counts = {
        temperature: [measured(context, side, kept[-1], of_temperature) for context, kept in runs]
        for temperature, of_temperature in rows.items()
    }
    return {(temperature, k): lengths_of(counts[temperature], k) for temperature, k in COLUMNS}


def lengths_of(counts: Sequence[tuple[Floats, Floats]], k: int) -> Floats:
    """Return the acceptance lengths at a draft length, of what was `measured` for each seed. [1 + B]"""
    drafts, accepted = (np.stack([one[i][k - 1] for one in counts]) for i in (0, 1))
    return acceptance_lengths(drafts, accepted)


def column_name(column: tuple[int, int]) -> str:
    temperature, k = column
    return f"k = {k}" + (f", temperature {temperature}" if temperature else "")


def acceptance_lengths(drafts: Floats, accepted: Floats) -> Floats:
    """Return the mean over seeds; each resample draws seeds and prompts. [S, P] -> [1 + B]

    The first has each seed and prompt once. Arrays of as many prompts and seeds have the same resamples, so
    that their quotients are paired.
    """
    seeds, num_prompts = drafts.shape
    drawn = np.random.default_rng(0).multinomial(num_prompts, [1 / num_prompts] * num_prompts, NUM_RESAMPLES)
    prompts = np.vstack([np.ones(num_prompts), drawn])  # how often each is drawn
    lengths = 1 + (prompts @ accepted.T) / (prompts @ drafts.T).clip(min=1)  # [1 + B, S]
    chosen = np.random.default_rng([0, seeds]).integers(seeds, size=(NUM_RESAMPLES, seeds))
    mean: Floats = np.take_along_axis(lengths, np.vstack([np.arange(seeds), chosen]), axis=1).mean(axis=1)
    return mean


def interval(values: Floats) -> Interval:
    """Return the first value with bounds that hold 95 % of the others. [1 + B]"""
    return Interval(float(values[0]), *map(float, np.quantile(values[1:], (0.025, 0.975))))


def shown(values: Floats) -> str:
    found = interval(values)
    return f"{found.value:.2f} ({found.low:.2f}-{found.high:.2f})"
