"""The ids of the captured layers. An id is the number of decoder layers that have been applied."""

from collections.abc import Iterable

from eagle31.errors import UserError


def default_aux_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Return an early, a middle and a late layer: (2, n // 2, n - 3), as in EAGLE 3.

    With fewer than seven layers these are not three distinct, increasing ids. With four to six layers the ids
    are (1, n // 2, n - 1), and with fewer the inputs of all layers.
    """
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    if num_layers >= 4:
        return (1, num_layers // 2, num_layers - 1)
    return tuple(range(num_layers))


def check_aux_layer_ids(aux_layer_ids: Iterable[int], num_layers: int) -> tuple[int, ...]:
    """Return the ids as a tuple.

    Raises:
        UserError: the ids are not increasing or not within 0..num_layers.
    """
    ids = tuple(aux_layer_ids)
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > num_layers:
        remedy = (
            "Id i is the input of decoder layer i; give distinct ids in increasing order from 0 (embeddings) "
            f"to {num_layers} (last layer's output), such as {list(default_aux_layer_ids(num_layers))}."
        )
        raise UserError("drafter.aux_layer_ids", list(ids), remedy)
    return ids
