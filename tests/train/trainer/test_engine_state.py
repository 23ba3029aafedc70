import pytest
import torch

from train.trainer.engine_state import Fragment, UnexpectedLayoutError, check_cover

SHAPE = torch.Size((4, 6))
WHOLE = [[Fragment(0, 10, 0)], [Fragment(10, 14, 3)], [Fragment(0, 0, 0)]]


def test_fragments_cover_a_matrix() -> None:
    check_cover([SHAPE], WHOLE)


@pytest.mark.parametrize(
    "fragments",
    [
        WHOLE[:1],  # the end is missing
        WHOLE[1:],  # the start is
        [[Fragment(0, 10, 0)], [Fragment(11, 13, 0)]],  # a hole
        [[Fragment(0, 12, 0)], [Fragment(10, 14, 0)]],  # an overlap
        [[Fragment(0, 12, 0)], [Fragment(12, 14, 0)]],  # beyond the end
        [[Fragment(0, 24, 0)], [Fragment(0, 24, 0)]],  # twice
    ],
)
def test_another_layout_is_refused(fragments: list[list[Fragment]]) -> None:
    with pytest.raises(UnexpectedLayoutError, match="lays out its partitions differently"):
        check_cover([SHAPE], fragments)
