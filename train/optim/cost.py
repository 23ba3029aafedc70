"""What orthogonalizing the drafter's matrices takes, which Muon does in each optimizer step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eagle31.kernels.newton_schulz import orthogonalization_elements
from train.optim.matrices import is_matrix
from train.optim.whole_matrices import busiest_owner_flops, rounds


@dataclass(frozen=True)
class OrthogonalizationWork:
    """The work of one optimizer step on the rank that has the most of it."""

    flops: int
    fraction: float  # of the rank's FLOPs of the step, forward and backward included


def matrix_shapes(tensors: Mapping[str, Sequence[int]]) -> list[Sequence[int]]:
    """Return the shapes of the weights that Muon updates, from those of all trained weights by name."""
    return [shape for name, shape in tensors.items() if is_matrix(name, shape)]


def orthogonalization_work(
    tensors: Mapping[str, Sequence[int]], *, num_ranks: int, rows_per_step: float, row_flops: int
) -> OrthogonalizationWork:
    """Return the work of orthogonalization.

    Args:
        tensors: shapes of the trained weights by name.
        rows_per_step: over all ranks, on average over the steps.
        row_flops: FLOPs of forward and backward of one row.
    """
    flops = busiest_owner_flops(matrix_shapes(tensors), num_ranks)
    step = row_flops * rows_per_step / num_ranks
    return OrthogonalizationWork(flops, flops / (flops + step))


def orthogonalization_bytes(
    shapes: Sequence[Sequence[int]], *, num_ranks: int, partitioned: bool, itemsize: int
) -> int:
    """Return the memory of exchanging and orthogonalizing matrices, at its peak.

    It is that of the largest batch: the received fragments, the whole matrices, and the iteration's tensors.

    Args:
        partitioned: whether the matrices are split among the ranks.
        itemsize: bytes of an element in which matrices are orthogonalized.
    """
    largest = 0
    for batch in (batch for batches in rounds(shapes, num_ranks) for batch in batches if batch):
        rows, columns = shapes[batch[0]]
        held = (2 if partitioned else 1) * rows * columns + orthogonalization_elements(rows, columns)
        largest = max(largest, len(batch) * held)
    return largest * itemsize
