"""Where DeepSpeed has each weight and its optimizer states: fragments of flat tensors, split among the ranks.

Checkpoints and Muon need it. DeepSpeed's own checkpoints resume with the same ranks and ZeRO stage alone and
run code when they are read, and its universal ones need a conversion in between.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from eagle31.errors import UserError
from train.distributed import World
from train.trainer.checkpoint_files import WEIGHTS, SavedFragment, SavedParts

_WHOLE = "fp32_groups_gradients_flat"  # of the optimizer that has the whole gradient
# What is used of DeepSpeed's internals: of its optimizers, the float32 weights first; and of each weight.
_OF_OPTIMIZER = {
    "DeepSpeedZeroOptimizer": ("single_partition_of_fp32_groups", "averaged_gradients"),
    "Bf16Optimizer": (
        "fp32_groups_flat_partition",
        "fp32_groups_gradient_flat_partition",
        _WHOLE,
        "update_lp_params",
    ),
    "DeepSpeedZeroOptimizer_Stage3": (
        "fp32_partitioned_groups_flat",
        "averaged_gradients",
        "grad_position",
        "get_param_id",
    ),
}
_OF_WEIGHT = {1: ("_hp_mapping",), 2: ("_hp_mapping",), 3: ("ds_id", "ds_numel", "ds_shape")}
_STEP = "step"  # of AdamW, a number and not a tensor of the weight's shape


@dataclass(frozen=True)
class Fragment:
    """The part of a flattened matrix that one rank updates; it may be empty."""

    start: int  # in the matrix
    length: int
    offset: int  # in the rank's flat tensor


@dataclass(frozen=True)
class FlatMatrices:
    """Matrices of a parameter group, or at ZeRO 3 of a part of it, in one flat tensor of each rank."""

    flat: Tensor  # float32 [N], this rank's weights, which DeepSpeed passes to the optimizer
    shapes: list[torch.Size]
    fragments: list[list[Fragment]]  # by rank, then by matrix


@dataclass(frozen=True)
class _Placed:
    """The part of a weight that this rank has."""

    name: str
    flat: int  # index in `master_weights`
    fragment: Fragment


def master_weights(model_engine: deepspeed.DeepSpeedEngine) -> list[Tensor]:
    """Return the float32 weights that this rank updates: the drafter's own at ZeRO 0, else partitions."""
    if not model_engine.zero_optimization():
        return list(model_engine.module.drafter.parameters())
    optimizer = model_engine.optimizer
    return list(getattr(optimizer, _OF_OPTIMIZER[type(optimizer).__name__][0]))


def has_whole_gradient(model_engine: deepspeed.DeepSpeedEngine) -> bool:
    """Return whether every rank has the whole reduced gradient, and not a part of it."""
    return not model_engine.zero_optimization() or hasattr(model_engine.optimizer, _WHOLE)


def reduced_gradients(model_engine: deepspeed.DeepSpeedEngine) -> list[Tensor]:
    """Return the reduced gradient, or this rank's part of it, float32.

    Call between a step's last backward pass and the model engine's step.
    """
    if not model_engine.zero_optimization():
        found = [weight.grad for weight in master_weights(model_engine)]
    elif has_whole_gradient(model_engine):
        found = getattr(model_engine.optimizer, _WHOLE)
    elif model_engine.zero_cpu_offload():
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # they are copied on another stream
        found = [weight.grad for weight in master_weights(model_engine)]
    else:
        found = [part for group in model_engine.optimizer.averaged_gradients.values() for part in group]
    return [gradient for gradient in found if gradient is not None]


def refresh_model(model_engine: deepspeed.DeepSpeedEngine) -> None:
    """Round the master weights into the model's. Every rank calls."""
    if not model_engine.zero_optimization():
        return  # they are the same tensors
    for parameter in model_engine.module.drafter.parameters():
        value = safe_get_full_fp32_param(parameter)
        assert value is not None
        # With ZeRO 3 all ranks write, and rank 0's values are divided among them.
        partitioned = [parameter] if hasattr(parameter, "ds_id") else []
        with deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0), torch.no_grad():
            parameter.data.copy_(value)


def saved_fragments(model_engine: deepspeed.DeepSpeedEngine, world: World) -> list[SavedFragment]:
    """Return what this rank writes into a checkpoint; over all ranks it is each element once.

    The values are views: nothing is copied.
    """
    kinds = [{WEIGHTS: master} | _states(model_engine, master) for master in master_weights(model_engine)]
    found = []
    for placed in _places(model_engine):
        fragment = placed.fragment
        if not model_engine.zero_optimization():  # every rank has all, and writes an equal share of it
            fragment = _share(fragment, world)
        if fragment.length:
            for kind, tensor in kinds[placed.flat].items():
                values = tensor.detach().view(-1)[fragment.offset : fragment.offset + fragment.length]
                found.append(SavedFragment(kind, placed.name, fragment.start, values))
    return found


def optimizer_steps(model_engine: deepspeed.DeepSpeedEngine) -> dict[str, float]:
    """Return how often the optimizer has updated each weight of which this rank has a part."""
    masters, state = master_weights(model_engine), model_engine.basic_optimizer.state
    return {
        placed.name: float(state[masters[placed.flat]][_STEP])
        for placed in _places(model_engine)
        if placed.fragment.length and _STEP in state.get(masters[placed.flat], {})
    }


@torch.no_grad()
def restore(model_engine: deepspeed.DeepSpeedEngine, parts: SavedParts) -> None:
    """Load weights and optimizer states. Each rank reads what it needs. Every rank calls.

    Raises:
        UserError: the checkpoint has other weights than the drafter.
        DamagedCheckpoint: it does not have all elements of them.
    """
    shapes = weight_shapes(model_engine)
    if parts.shapes != shapes:
        other = sorted(name for name in parts.shapes | shapes if parts.shapes.get(name) != shapes.get(name))
        remedy = (
            f"Its weights are not those of this drafter: {', '.join(other[:4])}. Give another output_dir."
        )
        raise UserError("output_dir", parts.checkpoint, remedy)
    masters = master_weights(model_engine)
    for placed in _places(model_engine):
        fragment, master = placed.fragment, masters[placed.flat]
        if not fragment.length:
            continue
        for kind in parts.kinds(placed.name):
            tensor = master if kind == WEIGHTS else _state_tensor(model_engine, master, kind)
            values = tensor.detach().view(-1)[fragment.offset : fragment.offset + fragment.length]
            parts.read(kind, placed.name, fragment.start, values)
        if placed.name in (steps := parts.manifest["optimizer_steps"]):
            _set_step(model_engine, master, steps[placed.name])
    refresh_model(model_engine)


def weight_shapes(model_engine: deepspeed.DeepSpeedEngine) -> dict[str, list[int]]:
    """Return the shapes of the drafter's weights by name."""
    named = model_engine.module.drafter.named_parameters()
    return {name: list(getattr(weight, "ds_shape", weight.shape)) for name, weight in named}


def _places(model_engine: deepspeed.DeepSpeedEngine) -> list[_Placed]:
    """Return which part of each weight this rank has, and where."""
    named: list[tuple[str, nn.Parameter]] = list(model_engine.module.drafter.named_parameters())
    if not model_engine.zero_optimization():
        return [
            _Placed(name, index, Fragment(0, weight.numel(), 0)) for index, (name, weight) in enumerate(named)
        ]
    return [_Placed(name, *own_fragment(model_engine, weight)) for name, weight in named]


def _share(whole: Fragment, world: World) -> Fragment:
    """Return this rank's share of a weight that every rank has."""
    begin, end = (whole.length * rank // world.size for rank in (world.rank, world.rank + 1))
    return Fragment(begin, end - begin, begin)


def _states(model_engine: deepspeed.DeepSpeedEngine, master: Tensor) -> dict[str, Tensor]:
    """Return the optimizer's states that have an element for each of a tensor's."""
    state = model_engine.basic_optimizer.state.get(master, {})
    return {kind: value for kind, value in state.items() if kind != _STEP}


def _state_tensor(model_engine: deepspeed.DeepSpeedEngine, master: Tensor, kind: str) -> Tensor:
    """Return an optimizer state of a tensor, which the first step would make otherwise."""
    state = model_engine.basic_optimizer.state[master]
    if kind not in state:
        state[kind] = torch.zeros_like(master, memory_format=torch.preserve_format)
    return state[kind]


def _set_step(model_engine: deepspeed.DeepSpeedEngine, master: Tensor, step: float) -> None:
    # Where AdamW has it: the fused kernel reads it on the device.
    value = torch.tensor(step, dtype=torch.float32, device=master.device)
    model_engine.basic_optimizer.state[master][_STEP] = value


def flat_matrices(
    model_engine: deepspeed.DeepSpeedEngine, matrices: Sequence[nn.Parameter], device: torch.device
) -> list[FlatMatrices]:
    """Return where the matrices of a parameter group are at ZeRO 1, 2 or 3. Every rank calls.

    Args:
        matrices: the weights of the optimizer's first parameter group.
        device: where collective operations take their tensors.
    """
    partitioned = model_engine.zero_optimization_stage() == 3
    by_flat: dict[int, list[tuple[nn.Parameter, Fragment]]] = {}
    for matrix in matrices:
        index, fragment = own_fragment(model_engine, matrix)
        # At ZeRO 1 and 2 a parameter group is one flat tensor, of which this rank may have nothing.
        by_flat.setdefault(index if partitioned else 0, []).append((matrix, fragment))
    flats = master_weights(model_engine)
    return [
        FlatMatrices(
            flats[index],
            [getattr(matrix, "ds_shape", matrix.shape) for matrix, _ in placed],  # at ZeRO 3 shape is [0]
            _of_all_ranks([fragment for _, fragment in placed], device),
        )
        for index, placed in sorted(by_flat.items())
    ]


def own_fragment(model_engine: deepspeed.DeepSpeedEngine, parameter: nn.Parameter) -> tuple[int, Fragment]:
    """Return which of this rank's flat tensors has a part of a weight at ZeRO 1, 2 or 3, and which part.

    The flat tensors are those of `master_weights`.
    """
    if model_engine.zero_optimization_stage() == 3:
        zero, rank = model_engine.optimizer, dist.get_rank()
        index, offset, size = zero.grad_position[zero.get_param_id(parameter)]  # size is padded
        start = min(rank * size, parameter.ds_numel)  # type: ignore[attr-defined]
        return index, Fragment(start, min(size, parameter.ds_numel - start), offset)  # type: ignore[attr-defined]
    mapping = parameter._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:
        return 0, Fragment(0, 0, 0)
    in_weight, in_flat = mapping.lp_fragment_address, mapping.hp_fragment_address
    assert in_weight.numel == in_flat.numel
    return mapping.param_group_index, Fragment(in_weight.start, in_weight.numel, in_flat.start)


def _of_all_ranks(own: list[Fragment], device: torch.device) -> list[list[Fragment]]:
    table = torch.tensor([[one.start, one.length, one.offset] for one in own], device=device)
    tables = [torch.empty_like(table) for _ in range(dist.get_world_size())]
    dist.all_gather(tables, table)
    return [[Fragment(*row) for row in one.tolist()] for one in tables]


def check_internals(model_engine: deepspeed.DeepSpeedEngine) -> None:
    """Raise UserError if the installed DeepSpeed lacks an internal that is used here."""
    used: dict[Any, tuple[str, ...]] = {model_engine: ("basic_optimizer", "gradient_average")}
    if model_engine.zero_optimization():
        optimizer, stage = model_engine.optimizer, model_engine.zero_optimization_stage()
        used[optimizer] = _OF_OPTIMIZER.get(type(optimizer).__name__, (f"weights at ZeRO {stage}",))
        used[next(model_engine.module.parameters())] = _OF_WEIGHT[stage]
    missing = [
        f"{type(o).__name__}.{name}" for o, names in used.items() for name in names if not hasattr(o, name)
    ]
    if missing:
        remedy = f"It has no {', '.join(missing)}; install the version that pyproject.toml names."
        raise UserError("deepspeed", deepspeed.__version__, remedy)
