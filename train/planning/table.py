"""The plan as a table on the terminal."""

from collections import Counter

import torch

from train.planning.commands import Command
from train.planning.layout import Layout
from train.planning.memory_check import gigabytes, rounded
from train.planning.plan import Plan
from train.planning.server_memory import CAPTURED_SEQUENCES
from train.planning.work import Hours, WorkPlan
from train.tables import aligned

_Line = tuple[str, str]


def format_plan(plan: Plan) -> str:
    """Return the plan as text."""
    sections = [_drafter_lines(plan), _memory_lines(plan), _target_lines(plan), work_lines(plan.work)]
    lines = [f"plan: {plan.recipe}, {plan.target_model}"]
    rows = [(f"  {name}", value) for section in sections for name, value in section]
    rows += [(f"  {name}", value) for name, value in hours_lines(plan.layout.hours)]
    lines += aligned(rows, text_columns=2)
    lines += [f"  note: {note}" for note in plan.notes]
    lines += [f"  DOES NOT FIT: {one}" for one in plan.shortages]
    if plan.layout.refusal is not None:
        lines.append(f"  CANNOT WORK: {plan.layout.refusal}")
    if plan.commands or plan.others:
        lines += _ways([(plan.layout, plan.commands), *plan.others])
    return "\n".join(lines)


def _ways(ways: list[tuple[Layout, list[Command]]]) -> list[str]:
    """Return the ways to run, by number of nodes, with commands or the reason why they cannot work."""
    lines = ["", "ways to run it, where TARGET1 and TRAIN1 stand for names of nodes"]
    for one, typed in sorted(ways, key=lambda way: way[0].num_nodes):
        cluster, kind = one.cluster, "" if one.kind is None else f", {one.kind.value}"
        nodes = f"{one.num_nodes} node{'s' if one.num_nodes > 1 else ''}"
        gpus = f" of {cluster.gpus_per_node} GPU{'s' if cluster.gpus_per_node > 1 else ''}"
        lines += ["", f"  {nodes}{gpus if cluster.gpus_per_node else ''}{kind}"]
        if one.target is not None:
            lines.append(f"    target    {one.target.where}")
        if not one.works:
            reasons = [one.refusal] if one.refusal else map(str, one.shortages)
            lines += [f"    cannot:   {reason}" for reason in reasons]
            continue
        lines += [f"    memory    {_memory_of(one)}"]
        lines += [f"    {name:9} {value}" for name, value in hours_lines(one.hours, briefly=True)]
        for command in typed:
            lines += [f"    on {command.where}:" if command.where != "Slurm" else "    or with Slurm:"]
            lines.append(f"      {command.line}")
    typed_lines = [command.line for _, typed in ways for command in typed]
    if any("/shared/" in line for line in typed_lines):
        lines += ["", "  /shared stands for a directory that every node reaches."]
    if any("serve_target" in line for line in typed_lines):
        lines.append("  Set VLLM_API_KEY to the same secret for the servers and the run.")
    return lines


def _memory_of(one: Layout) -> str:
    gpu = one.cluster.gpu_bytes
    room = "" if gpu is None else f" of {gigabytes(gpu)}"
    training = f"training {gigabytes(one.memory.total)}{room} per GPU"
    if one.server is None:
        return training
    needed = gigabytes(one.server.total(CAPTURED_SEQUENCES))
    given = one.placement.memory_fraction if one.placement is not None else None
    taken = "" if given is None or gpu is None else f" and takes {gigabytes(int(given * gpu))}"
    return f"{training}; vLLM needs {needed}{taken}, weights {gigabytes(one.server.weights)}"


def hours_lines(found: Hours | None, briefly: bool = False) -> list[_Line]:
    """Return name and value of the line about a run's hours.

    Args:
        briefly: without the speed that they are computed with.
    """
    if found is None:
        return []
    if found.how is None:
        return [("hours", "unknown; set plan.tflops_per_gpu")]
    parts = [f"training {_number(found.train)}", f"capture {_number(found.capture)}"]
    if found.regenerate:
        bound = "at least " if found.is_bound else ""
        parts.append(f"regeneration {bound}{_number(found.regenerate)}")
    total = "" if found.total is None else f"{found.total:.3g} in all: "
    if found.is_bound and found.total is not None:
        total = f"at least {total}"
    if briefly:
        return [("hours", f"{total}{', '.join(parts)}")]
    more = "; set plan.decode_tokens_per_second_per_gpu for those of generation" if found.is_bound else ""
    return [("hours", f"{total}{', '.join(parts)} ({found.how}{more})")]


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"


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
        ("optimizer", plan.optimizer),
    ]


def _memory_lines(plan: Plan) -> list[_Line]:
    settings, memory = plan.layout.settings, plan.layout.memory
    how = (
        f"{settings.world_size} x ZeRO {settings.zero_stage} in {'bf16' if settings.bf16 else 'fp32'}, "
        f"rows of {settings.row_tokens:,} tokens, all written by the assistant"
    )
    offloaded = [name for name in ("offload_optimizer", "offload_parameters") if getattr(settings, name)]
    parts = [(f"  {name.replace('_', ' ')}", gigabytes(size)) for name, size in memory.parts().items()]
    room = "" if plan.gpu_bytes is None else f" of {gigabytes(plan.gpu_bytes)}"
    lines = [
        ("training, per process", ", ".join([how, *offloaded])),
        *parts,
        ("  peak", f"{gigabytes(memory.total)}{room}"),
    ]
    if (muon := plan.orthogonalization) is not None:
        value = f"{muon.flops:.3g} per step on the busiest process, {muon.fraction:.1%} of its step"
        lines.append(("FLOPs of Newton-Schulz", value))
    return lines


def _target_lines(plan: Plan) -> list[_Line]:
    counts, target = plan.target.parameters, plan.layout.target
    weights = gigabytes(plan.target.checkpoint_bytes)
    lines = [
        (
            "target",
            f"{rounded(counts.total, 4)} parameters, {rounded(counts.active, 3)} active per token",
        )
    ]
    if target is None:
        return [*lines, ("  weights", weights)]
    per_gpu = f"{weights}, {gigabytes(target.bytes_per_gpu)} per GPU"
    return [*lines, ("  weights", per_gpu), ("  capture", target.where)]


def work_lines(work: WorkPlan) -> list[_Line]:
    """Return name and value of each line about the run's work."""

    def shown(value: float | None, form: str) -> str:
        return "unknown" if value is None else format(value, form)

    mean = work.mean_rows_per_step
    rows = "" if mean is None else f", {mean:.3g} rows per step on average"
    tokens = "unknown" if work.tokens.count is None else f"{work.tokens.count:,} ({work.tokens.source})"
    lines = [
        ("tokens", tokens if work.tokens.known else work.tokens.source),
        (
            "steps",
            "unknown"
            if work.steps is None
            else f"{work.steps:,}, {work.trained_tokens:,} tokens in rows{rows}",
        ),
        ("hidden states", "unknown" if work.store_bytes is None else gigabytes(work.store_bytes)),
        ("FLOPs of a row", f"{work.step_flops.total:.3g}"),
        ("FLOPs of training", shown(work.train_flops, ".3g")),
        ("FLOPs of capture", shown(work.capture_flops, ".3g")),
    ]
    if work.regeneration is not None:
        generated = f"{work.regeneration.generated_tokens:,} tokens generated"
        lines.append(("FLOPs of regeneration", f"{work.regeneration.flops:.3g}, {generated}"))
    return lines
