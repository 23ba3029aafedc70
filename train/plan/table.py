"""The plan as a table on the terminal."""

from train.plan.memory import TrainerSettings
from train.plan.plan import Plan, Way
from train.plan.sizes import RunSizes, trainer_settings
from train.plan.work import Hours, Work
from train.tables import aligned, counted, gigabytes, rounded
from train.trainer.learning_rate import described

_Line = tuple[str, str]


def format_plan(plan: Plan) -> str:
    """Return the plan as text."""
    way = plan.first
    sizes, config = plan.sizes, plan.sizes.config
    settings = trainer_settings(config, way.cluster.num_ranks)
    sections = [_drafter_lines(sizes), _memory_lines(way, settings), _target_lines(sizes, way)]
    sections.append(work_lines(plan.work))
    lines = [f"plan: {config.recipe_name}, {config.target.model}"]
    rows = [(f"  {name}", value) for section in sections for name, value in section]
    apart = len(plan.ways) > 1 or bool(way.commands)  # each way has its own lines
    if not apart:
        rows += [(f"  {name}", value) for name, value in hours_lines(way.hours)]
    lines += aligned(rows, text_columns=2)
    lines += [f"  note: {note}" for note in plan.notes]
    if plan.unserved is not None:
        lines.append(f"  WARNING: {plan.unserved}")
    lines += [f"  DOES NOT FIT: {one}" for one in [*([] if apart else way.shortages), *plan.lacking]]
    if way.refusal is not None and not apart:
        lines.append(f"  CANNOT WORK: {way.refusal}")
    return "\n".join([*lines, *(_ways(plan.ways) if apart else [])])


def _ways(ways: list[Way]) -> list[str]:
    """Return the ways to run, with commands or the reason why they cannot work."""
    lines = []
    for way in ways:
        nodes, gpus = counted(way.cluster.all_nodes, "node"), way.cluster.gpus_per_node
        lines += ["", f"  {nodes} of {counted(gpus, 'GPU')}" if gpus else f"  {nodes}"]
        if not way.works:
            reasons = [way.refusal] if way.refusal else []
            lines += [f"    cannot:   {reason}" for reason in [*reasons, *map(str, way.shortages)]]
            continue
        if way.target is not None:
            lines.append(f"    target    {way.target.where}")
        lines.append(f"    memory    {_memory_of(way)}")
        lines += [f"    {name:9} {value}" for name, value in hours_lines(way.hours)]
        for where, line in way.commands:
            lines += ["    or with Slurm:" if where == "Slurm" else f"    on {where}:", f"      {line}"]
    typed = [line for way in ways for _, line in way.commands]
    if any("/shared/" in line for line in typed):
        lines += [
            "",
            "  /shared stands for a directory that every node reaches, TRAIN1 and TARGET1 for nodes.",
        ]
    if any("serve_target" in line for line in typed):
        lines.append("  Set VLLM_API_KEY to the same secret for the servers and the run.")
    return lines


def _memory_of(way: Way) -> str:
    gpu = way.cluster.gpu_bytes
    room = "" if gpu is None else f" of {gigabytes(gpu)}"
    each = "GPU" if way.cluster.gpus_per_node else "process"
    training = f"training {gigabytes(way.memory.total)}{room} per {each}"
    if way.servers is None or way.servers.server is None:
        return training
    given, server = way.servers.engine_args.get("gpu_memory_utilization"), way.servers.server
    taken = "" if given is None or gpu is None else f" and takes {gigabytes(int(given * gpu))}"
    return f"{training}; vLLM needs {gigabytes(server.least)}{taken}, weights {gigabytes(server.weights)}"


def hours_lines(found: Hours | None) -> list[_Line]:
    """Return name and value of the line about a run's hours; none where it cannot run."""
    if found is None:
        return []
    if found.how is None:
        return [("hours", "unknown; set plan.tflops_per_gpu")]

    def shown(value: float | None) -> str:
        if value is None:
            return "unknown"
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    parts = [f"training {shown(found.train)}", f"capture {shown(found.capture)}"]
    bound = "at least " if found.regenerate else ""
    if found.regenerate != 0:
        parts.append(f"regeneration {bound}{shown(found.regenerate)}")
    total = "" if found.total is None else f"{bound}{shown(found.total)} in all: "
    return [("hours", f"{total}{', '.join(parts)} ({found.how})")]


def _drafter_lines(sizes: RunSizes) -> list[_Line]:
    drafter = sizes.drafter
    shape = (
        f"{drafter.attention.title}, hidden {drafter.hidden_size}, feed-forward {drafter.intermediate_size}, "
        f"{drafter.num_attention_heads}/{drafter.num_key_value_heads} heads, "
        f"aux layers {list(drafter.aux_layer_ids)}, "
        f"draft vocabulary {drafter.draft_vocab_size:,} of {drafter.vocab_size:,}"
    )
    return [
        ("drafter", shape),
        ("trained parameters", f"{sizes.num_parameters / 1e6:,.1f} M"),
        ("optimizer", described(sizes.config.optim, drafter)),
    ]


def _memory_lines(way: Way, settings: TrainerSettings) -> list[_Line]:
    memory, gpu = way.memory, way.cluster.gpu_bytes
    how = (
        f"{settings.world_size} x ZeRO {settings.zero_stage} in {'bf16' if settings.bf16 else 'fp32'}, "
        f"rows of {settings.row_tokens:,} tokens, all written by the assistant"
    )
    offloaded = ["offload_optimizer"] if settings.offload_optimizer else []
    parts = [
        (f"  {name.replace('_', ' ')}", gigabytes(size)) for name, size in memory.parts().items() if size
    ]
    room = "" if gpu is None else f" of {gigabytes(gpu)}"
    return [
        ("training, per process", ", ".join([how, *offloaded])),
        *parts,
        ("  peak", f"{gigabytes(memory.total)}{room}"),
    ]


def _target_lines(sizes: RunSizes, way: Way) -> list[_Line]:
    counts, target = sizes.target.parameters, way.target
    weights = gigabytes(sizes.target.checkpoint_bytes)
    shape = f"{rounded(counts.total, 4)} parameters, {rounded(counts.active, 3)} active per token"
    if target is None:
        return [("target", shape), ("  weights", weights)]
    each = "GPU" if way.cluster.gpus_per_node else "process"
    per_gpu = f"{weights}, {gigabytes(target.bytes_per_gpu)} per {each}"
    return [("target", shape), ("  weights", per_gpu), ("  capture", target.where)]


def work_lines(work: Work) -> list[_Line]:
    """Return name and value of each line about the run's work."""

    def shown(value: float | None) -> str:
        return "unknown" if value is None else f"{value:.3g}"

    states = "unknown"
    if work.store_bytes is not None:  # 0: training gets them at once, or from a given store
        states = gigabytes(work.store_bytes) if work.store_bytes else "none to store"
        states += " wait at most" if work.online and work.store_bytes else ""
    steps = "unknown" if work.steps is None else f"{work.steps:,}, {work.trained_tokens:,} tokens in rows"
    lines = [
        ("tokens", work.tokens_from if work.tokens is None else f"{work.tokens:,} ({work.tokens_from})"),
        ("steps", steps),
        ("hidden states", f"{states}, and {gigabytes(work.held_out_bytes)} of held-out prompts"),
        ("FLOPs of a row", f"{work.step_flops.total:.3g}"),
        ("FLOPs of training", shown(work.train_flops)),
        ("FLOPs of capture", shown(work.capture_flops)),
    ]
    if (written := work.completions) is None:
        lines.append(("FLOPs of regeneration", shown(None)))
    elif written.tokens:
        flops = written.prefill_flops + written.decoding_flops
        generated = f"{written.tokens:,} tokens generated in {written.steps:,} steps"
        lines.append(("FLOPs of regeneration", f"{shown(flops)}, {generated}"))
        lines.append(("memory read for it", gigabytes(written.read_bytes)))
    return lines
