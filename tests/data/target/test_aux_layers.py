import pytest

from data.target.aux_layers import check_aux_layer_ids, default_aux_layer_ids
from eagle31.errors import UserError


def test_default_aux_layer_ids_are_valid() -> None:
    assert default_aux_layer_ids(32) == (2, 16, 29)
    for num_layers in range(1, 70):
        ids = default_aux_layer_ids(num_layers)
        assert check_aux_layer_ids(ids, num_layers) == ids
        assert len(ids) == min(3, num_layers)


@pytest.mark.parametrize("ids", [(), (2, 1), (1, 1, 2), (-1, 2), (1, 6)])
def test_invalid_aux_layer_ids_are_user_errors(ids: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"drafter\.aux_layer_ids"):
        check_aux_layer_ids(ids, num_layers=5)
