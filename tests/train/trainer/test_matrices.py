import pytest
import torch

from eagle31.kernels.newton_schulz import orthogonalization_flops
from train.trainer.matrices import BATCH_ELEMENTS, rounds

# fc, q, k, v, o, gate, up, down of a drafter with hidden size 4096
SHAPES = [
    (4096, 12288), (4096, 8192), (1024, 8192), (1024, 8192), (4096, 4096), (14336, 4096), (14336, 4096),
    (4096, 14336),
]  # fmt: skip


@pytest.mark.parametrize("num_owners", [1, 2, 3, 8, 16])
def test_every_matrix_has_one_owner_and_one_round(num_owners: int) -> None:
    found = rounds(SHAPES, num_owners)
    assert all(len(batches) == num_owners for batches in found)
    indices = [index for batches in found for batch in batches for index in batch]
    assert sorted(indices) == list(range(len(SHAPES)))
    for batch in (batch for batches in found for batch in batches if batch):
        assert len({SHAPES[index] for index in batch}) == 1
        elements = sum(torch.Size(SHAPES[index]).numel() for index in batch)
        assert len(batch) == 1 or elements <= BATCH_ELEMENTS


def test_small_matrices_of_a_shape_are_one_batch() -> None:
    assert [[0, 1, 2]] in rounds([(8, 4)] * 3 + [(4, 8)], 1)


@pytest.mark.parametrize("num_owners", [2, 3, 4])
def test_owners_have_about_the_same_work(num_owners: int) -> None:
    flops = [orthogonalization_flops(*shape) for shape in SHAPES]
    loads = [0] * num_owners
    for batches in rounds(SHAPES, num_owners):
        for owner, batch in enumerate(batches):
            loads[owner] += sum(flops[index] for index in batch)
    busiest = max(loads)
    assert sum(flops) / num_owners <= busiest <= max(max(flops), 1.34 * sum(flops) / num_owners)
