"""The plan as a table on the terminal."""

from collections import Counter

import torch

from train.planning.memory_check import gigabytes, rounded
from train.planning.plan import Plan
from train.planning.work import WorkPlan
from train.tables import aligned


def format_plan(plan: Plan) -> str:
    """Return the plan as text."""
    sections = [_drafter_lines(plan), _memory_lines(plan), _target_lines(plan), work_lines(plan.work)]
    lines = [f"plan: {plan.recipe}, {plan.target_model}"]
    rows = [(f"  {name}", value) for section in sections for name, value in section]
    lines += aligned(rows, text_columns=2)
    lines += [f"  note: {note}" for note in plan.notes]
    for one in plan.shortages:
        lines.append(
            f"  DOES NOT FIT: {one.what} needs {gigabytes(one.needed_bytes)}, "
            f"{gigabytes(one.available_bytes)} are available. {one.change}"
        )
    return "\n".join(lines)


_Line = tuple[str, str]


def _drafter_lines(plan: Plan) -> list[_Line]:
    drafter = plan.drafter
    kind = "GQA" if drafter.mla is None else "MLA"
    shape = (
        f"{kind}, hidden {drafter.hidden_size}, feed-forward {drafter.intermediate_size}, "
        f"{drafter.num_attention_heads}/{drafter.num_key_value_heads} heads, "
        f"aux layers {list(drafter.aux_layer_ids)}, "
        f"draft vocabulary {drafter.draft_vocab_size:,} of {drafter.vocab_size:,}"
    )
    counts = Counter(tuple(shape) for shape in plan.tensors.values())
    tensors = ", ".join(
        f"{n} x {list(shape)}" if n > 1 else f"{list(shape)}"
        for shape, n in sorted(counts.items(), key=lambda item: -torch.Size(item[0]).numel())
    )
    return [
        ("drafter", shape),
        ("trained parameters", f"{plan.num_parameters / 1e6:,.1f} M"),
        ("tensors", tensors),
    ]


def _memory_lines(plan: Plan) -> list[_Line]:
    settings = plan.settings
    how = (
        f"{settings.world_size} x ZeRO {settings.zero_stage} in {'bf16' if settings.bf16 else 'fp32'}, "
        f"rows of {settings.row_tokens:,} tokens, all written by the assistant"
    )
    offloaded = [name for name in ("offload_optimizer", "offload_parameters") if getattr(settings, name)]
    parts = [(f"  {name.replace('_', ' ')}", gigabytes(size)) for name, size in plan.memory.parts().items()]
    room = "" if plan.gpu_bytes is None else f" of {gigabytes(plan.gpu_bytes)}"
    return [
        ("training, per process", ", ".join([how, *offloaded])),
        *parts,
        ("  peak", f"{gigabytes(plan.memory.total)}{room}"),
    ]


def _target_lines(plan: Plan) -> list[_Line]:
    target = plan.target
    counts = target.parameters
    return [
        (
            "target",
            f"{rounded(counts.total, 4)} parameters, {rounded(counts.active, 3)} active per token",
        ),
        ("  weights", f"{gigabytes(target.checkpoint_bytes)}, {gigabytes(target.bytes_per_gpu)} per GPU"),
        ("  capture", target.split),
    ]


def work_lines(work: WorkPlan) -> list[_Line]:
    """Return name and value of each line about the run's work."""

    def shown(value: float | None, form: str) -> str:
        return "unknown" if value is None else format(value, form)

    tokens = "unknown" if work.tokens.count is None else f"{work.tokens.count:,} ({work.tokens.source})"
    lines = [
        ("tokens", tokens if work.tokens.known else work.tokens.source),
        (
            "steps",
            "unknown" if work.steps is None else f"{work.steps:,}, {work.trained_tokens:,} tokens in rows",
        ),
        ("hidden states", "unknown" if work.store_bytes is None else gigabytes(work.store_bytes)),
        ("FLOPs of a row", f"{work.step_flops.total:.3g}"),
        ("FLOPs of training", shown(work.train_flops, ".3g")),
        ("FLOPs of capture", shown(work.capture_flops, ".3g")),
    ]
    if work.rate is None:
        return [*lines, ("hours", "unknown; set plan.tflops_per_gpu")]
    capture = "" if work.capture_hours is None else f", capture {work.capture_hours:.3g}"
    return [*lines, ("hours", f"training {shown(work.train_hours, '.3g')}{capture} ({work.rate})")]
