import pytest
import torch

from eagle31.kernels.newton_schulz import orthogonalization_flops
from train.trainer.matrices import BATCH_ELEMENTS, rounds

# fc, q, k, v, o, gate, up, down of a drafter with hidden size 4096
SHAPES = [
    (4096, 12288), (4096, 8192), (1024, 8192), (1024, 8192), (4096, 4096), (14336, 4096), (14336, 4096),
    (4096, 14336),
]  # fmt: skip


@pytest.mark.parametrize("num_owners", [1, 3, 16])
def test_every_matrix_has_one_owner_and_one_round(num_owners: int) -> None:
    found = rounds(SHAPES, num_owners)
    assert all(len(batches) == num_owners for batches in found)
    indices = [index for batches in found for batch in batches for index in batch]
    assert sorted(indices) == list(range(len(SHAPES)))
    for batch in (batch for batches in found for batch in batches if batch):
        assert len({SHAPES[index] for index in batch}) == 1
        elements = sum(torch.Size(SHAPES[index]).numel() for index in batch)
        assert len(batch) == 1 or elements <= BATCH_ELEMENTS


def test_owners_have_similar_work() -> None:
    def load(batches: list[list[int]]) -> int:
        return sum(orthogonalization_flops(*SHAPES[index]) for batch in batches for index in batch)

    loads = [load(list(of_owner)) for of_owner in zip(*rounds(SHAPES, 2), strict=True)]
    assert max(loads) < 1.05 * min(loads)
