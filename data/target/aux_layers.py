"""The aux layer ids: how many decoder layers have been applied."""

from collections.abc import Iterable

from eagle31.errors import UserError


def default_aux_layer_ids(num_layers: int) -> tuple[int, ...]:
    """An early, a middle and a late layer: (2, n // 2, n - 3), as EAGLE 3 chose.

    Below seven layers these are not three distinct ids in rising order: (1, n // 2, n - 1) is taken from four
    layers on, and the input of every layer (at most three) below that.
    """
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    if num_layers >= 4:
        return (1, num_layers // 2, num_layers - 1)
    return tuple(range(num_layers))


def check_aux_layer_ids(aux_layer_ids: Iterable[int], num_layers: int) -> tuple[int, ...]:
    """Returns the ids as a tuple.

    Raises:
        UserError: they are not sorted, distinct and within 0..num_layers.
    """
    ids = tuple(aux_layer_ids)
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > num_layers:
        remedy = (
            "Id i is the input of decoder layer i; give distinct ids in rising order from 0 (embeddings) to "
            f"{num_layers} (last layer's output), such as {list(default_aux_layer_ids(num_layers))}."
        )
        raise UserError("drafter.aux_layer_ids", list(ids), remedy)
    return ids
