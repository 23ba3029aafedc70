"""The plan: what a run will take, before any weight is touched."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch

from data.target.architecture import active_intermediate_size, expert_intermediate_size
from data.target.aux_layers import check_aux_layer_ids, default_aux_layer_ids
from eagle31.export.layouts import check_layout
from eagle31.json_files import write_json
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from train.config import Precision, RunConfig, Stage
from train.context import RunContext, complete_shape
from train.plan_fit import Misfit, counted, gigabytes, misfits
from train.plan_memory import TrainerMemory, TrainerSettings, trainer_memory, worst_counts
from train.plan_target import TargetPlan, planned_config, target_plan
from train.plan_work import WorkPlan, newest_data_facts, work_plan

PLAN = "plan.json"


@dataclass(frozen=True)
class Plan:
    """Everything that `plan.json` has."""

    recipe: str
    target_model: str
    drafter: DrafterConfig
    tensors: dict[str, list[int]]  # shape by name, of what is trained
    num_parameters: int
    settings: TrainerSettings
    memory: TrainerMemory
    target: TargetPlan
    work: WorkPlan
    gpu_bytes: int | None
    misfits: list[Misfit]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        values["memory"]["total"] = self.memory.total
        values["target"] |= {
            "bytes_per_gpu": self.target.bytes_per_gpu,
            "num_replicas": self.target.num_replicas,
        }
        return values


def announce_plan(context: RunContext) -> None:
    """Prints the plan and writes it into the output directory."""
    plan = make_plan(context)
    print(format_plan(plan), flush=True)
    write_json(context.output_dir / PLAN, plan.to_json())


def announce_work(context: RunContext) -> None:
    """The same once the data is tokenised: prints what that changes."""
    plan = make_plan(context)
    print("plan: " + "; ".join(f"{name} {value}" for name, value in work_lines(plan.work)), flush=True)
    write_json(context.output_dir / PLAN, plan.to_json())


def make_plan(context: RunContext) -> Plan:
    """From the recipe and the target's config; the drafter is built without memory.

    Raises:
        UserError: the recipe contradicts the target's config, or no drafter can be made of them.
    """
    config = context.config
    target_config = planned_config(config.target)
    text = target_config.get_text_config()
    ids = config.drafter.aux_layer_ids
    if ids is None:
        aux_layer_ids = default_aux_layer_ids(text.num_hidden_layers)
    else:
        aux_layer_ids = check_aux_layer_ids(ids, text.num_hidden_layers)
    drafter = complete_shape(
        config.drafter,
        target_config,
        aux_layer_ids,
        text.vocab_size,
        config.drafter.draft_vocab_size or text.vocab_size,
    )
    check_layout(drafter, config.export.layout)
    with torch.device("meta"):
        parameters = dict(Drafter(drafter, with_head=config.drafter.train_lm_head).named_parameters())
    num_parameters = sum(parameter.numel() for parameter in parameters.values())
    num_gpus = config.plan.num_gpus or context.world.size
    settings = trainer_settings(config, num_gpus)
    gpu_bytes = available_gpu_bytes(config)
    device = "cuda" if gpu_bytes is not None else context.world.device.type

    def memory_of(settings: TrainerSettings) -> TrainerMemory:
        counts = worst_counts(settings.row_tokens, config.train.ttt_steps)
        return trainer_memory(drafter, num_parameters, settings, counts, device)

    target = target_plan(config, target_config, num_gpus)
    data = context.artifacts.get(Stage.data)
    facts = data.record["facts"] if data is not None else newest_data_facts(context.output_dir)
    work = work_plan(config, drafter, target, num_gpus, facts)
    return Plan(
        recipe=config.recipe_name,
        target_model=config.target.model,
        drafter=drafter,
        tensors={name: list(parameter.shape) for name, parameter in parameters.items()},
        num_parameters=num_parameters,
        settings=settings,
        memory=memory_of(settings),
        target=target,
        work=work,
        gpu_bytes=gpu_bytes,
        misfits=misfits(config, settings, memory_of, target, work, gpu_bytes, for_this_machine(config)),
        notes=notes(config, drafter, target_config),
    )


def trainer_settings(config: RunConfig, num_gpus: int) -> TrainerSettings:
    return TrainerSettings(
        zero_stage=config.deepspeed.zero_stage,
        bf16=config.deepspeed.precision is Precision.bf16,
        offload_optimizer=config.deepspeed.offload_optimizer,
        offload_parameters=config.deepspeed.offload_parameters,
        train_lm_head=config.drafter.train_lm_head,
        activation_checkpointing=config.train.activation_checkpointing,
        row_tokens=config.train.row_tokens,
        rows_per_step=config.train.rows_per_step,
        world_size=num_gpus,
    )


def available_gpu_bytes(config: RunConfig) -> int | None:
    """What the recipe says, else this machine's first GPU has; None without either."""
    if config.plan.gpu_memory_gb is not None:
        return int(config.plan.gpu_memory_gb * 1e9)
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def for_this_machine(config: RunConfig) -> bool:
    """Not where the recipe tells of GPUs that are not here."""
    return config.plan.gpu_memory_gb is None or torch.cuda.is_available()


def notes(config: RunConfig, drafter: DrafterConfig, target_config: Any) -> list[str]:
    """What the plan cannot see, and what looks like a mistake."""
    found = []
    if config.drafter.init_from is not None:
        found.append("drafter.init_from is not read here: its checkpoint may complete the drafter's shape")
    if not for_this_machine(config):
        found.append("there is no GPU here: disks and the spool's memory are not looked at")
    active, single = active_intermediate_size(target_config), expert_intermediate_size(target_config)
    if single is not None and active is not None and drafter.intermediate_size < active:
        found.append(
            f"drafter.intermediate_size={drafter.intermediate_size} is narrower than what one token of the "
            f"target passes through: its experts together are {active} wide, one of them {single}"
        )
    return found


def format_plan(plan: Plan) -> str:
    """The table for stdout."""
    sections = [_drafter_lines(plan), _memory_lines(plan), _target_lines(plan), work_lines(plan.work)]
    lines = [f"plan: {plan.recipe}, {plan.target_model}"]
    for section in sections:
        lines += [f"  {name:<24} {value}" for name, value in section]
    lines += [f"  note: {note}" for note in plan.notes]
    for one in plan.misfits:
        lines.append(
            f"  DOES NOT FIT: {one.what} needs {gigabytes(one.needed_bytes)} where "
            f"{gigabytes(one.available_bytes)} can be had. {one.change}"
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
        f"rows of {settings.row_tokens:,} tokens, all of them the assistant's"
    )
    offloaded = [name for name in ("offload_optimizer", "offload_parameters") if getattr(settings, name)]
    parts = [(f"  {name.replace('_', ' ')}", gigabytes(size)) for name, size in plan.memory.parts().items()]
    room = "" if plan.gpu_bytes is None else f" of {gigabytes(plan.gpu_bytes)}"
    return [
        ("training, each process", ", ".join([how, *offloaded])),
        *parts,
        ("  at its peak", f"{gigabytes(plan.memory.total)}{room}"),
    ]


def _target_lines(plan: Plan) -> list[_Line]:
    target = plan.target
    counts = target.parameters
    return [
        (
            "target",
            f"{counted(counts.total, 4)} parameters, {counted(counts.active, 3)} in a token's products",
        ),
        ("  weights", f"{gigabytes(target.checkpoint_bytes)}, {gigabytes(target.bytes_per_gpu)} a GPU"),
        ("  capture", target.split),
    ]


def work_lines(work: WorkPlan) -> list[_Line]:
    def shown(value: float | None, form: str) -> str:
        return "unknown" if value is None else format(value, form)

    tokens = "unknown" if work.tokens.count is None else f"{work.tokens.count:,} ({work.tokens.source})"
    lines = [
        ("tokens", tokens if work.tokens.known else work.tokens.source),
        (
            "steps",
            "unknown" if work.steps is None else f"{work.steps:,}, {work.trained_tokens:,} tokens of rows",
        ),
        ("hidden states", "unknown" if work.store_bytes is None else gigabytes(work.store_bytes)),
        ("operations of a row", f"{work.step_flops.total:.3g}"),
        ("operations of training", shown(work.train_flops, ".3g")),
        ("operations of capture", shown(work.capture_flops, ".3g")),
    ]
    if work.rate is None:
        return [*lines, ("hours", "unknown; give plan.tflops_per_gpu")]
    capture = "" if work.capture_hours is None else f", capture {work.capture_hours:.3g}"
    return [*lines, ("hours", f"training {shown(work.train_hours, '.3g')}{capture} ({work.rate})")]
