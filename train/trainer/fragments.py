"""Where the elements of each matrix are in the flat tensors that DeepSpeed splits among the ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn


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


class UnexpectedLayoutError(RuntimeError):
    """DeepSpeed's partitions are not laid out as this module reads them."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"DeepSpeed {deepspeed.__version__} lays out its partitions differently: {reason}")


def flat_matrices(
    model_engine: deepspeed.DeepSpeedEngine, matrices: Sequence[nn.Parameter], device: torch.device
) -> list[FlatMatrices]:
    """Return where the matrices of a parameter group are at ZeRO 1, 2 or 3. Every rank calls.

    Args:
        matrices: the weights of the optimizer's first parameter group.
        device: where collective operations take their tensors.

    Raises:
        UnexpectedLayoutError: the fragments of the ranks do not cover each matrix exactly once, or do not
            have its values.
    """
    read = _stage3_fragments if model_engine.zero_optimization_stage() == 3 else _stage12_fragments
    found = []
    for flat, parameters, values, own in read(model_engine, matrices):
        for fragment, value in zip(own, values, strict=True):
            part = flat.detach()[fragment.offset : fragment.offset + fragment.length]
            if not torch.equal(part.to(value), value):
                raise UnexpectedLayoutError("a partition does not have the values of its weights")
        shapes = [_shape(parameter) for parameter in parameters]
        fragments = _of_all_ranks(own, device)
        check_cover(shapes, fragments)
        found.append(FlatMatrices(flat, shapes, fragments))
    return found


def check_cover(shapes: Sequence[torch.Size], fragments: Sequence[Sequence[Fragment]]) -> None:
    """Raise UnexpectedLayoutError unless the ranks' fragments cover each matrix exactly once."""
    for index, shape in enumerate(shapes):
        parts = sorted((one[index].start, one[index].length) for one in fragments if one[index].length)
        end = 0
        for start, length in parts:
            if start != end:
                raise UnexpectedLayoutError(
                    f"element {end} of a matrix {list(shape)} is not where it should be"
                )
            end += length
        if end != shape.numel():
            raise UnexpectedLayoutError(f"{end} of the {shape.numel()} elements of a matrix are on some rank")


def own_fragment(model_engine: deepspeed.DeepSpeedEngine, parameter: nn.Parameter) -> tuple[int, Fragment]:
    """Return which of this rank's flat tensors has a part of a weight at ZeRO 1, 2 or 3, and which part.

    The flat tensors are those of `train.trainer.engine_state.master_weights`.

    Raises:
        UnexpectedLayoutError: DeepSpeed's partitions are not as expected.
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
    if in_weight.numel != in_flat.numel:
        raise UnexpectedLayoutError(f"{in_weight} and {in_flat} differ in length")
    return mapping.param_group_index, Fragment(in_weight.start, in_weight.numel, in_flat.start)


_Partition = tuple[Tensor, Sequence[nn.Parameter], list[Tensor], list[Fragment]]


def _stage12_fragments(
    model_engine: deepspeed.DeepSpeedEngine, matrices: Sequence[nn.Parameter]
) -> list[_Partition]:
    """Return the flat tensor, its matrices, and the values and place of this rank's fragment of each."""
    (flat,) = model_engine.basic_optimizer.param_groups[0]["params"]
    own = [own_fragment(model_engine, matrix)[1] for matrix in matrices]
    values = [
        matrix.data.flatten()[fragment.start : fragment.start + fragment.length]
        for matrix, fragment in zip(matrices, own, strict=True)
    ]
    return [(flat, matrices, values, own)]


def _stage3_fragments(
    model_engine: deepspeed.DeepSpeedEngine, matrices: Sequence[nn.Parameter]
) -> list[_Partition]:
    by_flat: dict[int, list[tuple[nn.Parameter, Fragment]]] = {}
    for matrix in matrices:
        index, fragment = own_fragment(model_engine, matrix)
        by_flat.setdefault(index, []).append((matrix, fragment))
    found: list[_Partition] = []
    for index, placed in sorted(by_flat.items()):
        parameters, own = [matrix for matrix, _ in placed], [fragment for _, fragment in placed]
        values = [
            matrix.ds_tensor.data.flatten()[: fragment.length]  # type: ignore[attr-defined]
            for matrix, fragment in placed
        ]
        found.append((model_engine.optimizer.fp32_partitioned_groups_flat[index], parameters, values, own))
    return found


def _shape(parameter: nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)  # at ZeRO 3 its own shape is [0]


def _of_all_ranks(own: list[Fragment], device: torch.device) -> list[list[Fragment]]:
    table = torch.tensor([[one.start, one.length, one.offset] for one in own], device=device)
    tables = [torch.empty_like(table) for _ in range(dist.get_world_size())]
    dist.all_gather(tables, table)
    return [[Fragment(*row) for row in one.tolist()] for one in tables]
