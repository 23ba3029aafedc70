"""The input of one training step, and the drafts of it that the loss supervises."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

STATES = ("aux_hidden_states", "final_hidden_states")
_RUN = 64  # consecutive rows that are sampled together, at least
# Each run of a document is a call of attention, whose backward pass has gradients of all keys before it.
_MOST_RUNS = 32


@dataclass(frozen=True)
class PackedBatch:
    """Several documents packed one after another into one row, and padding at its end.

    T tokens, A aux layers, Ht the target's hidden size. Padding has `document_ids` -1 and `loss_mask` false.
    """

    input_ids: Tensor  # int64 [T]
    loss_mask: Tensor  # bool [T], true where the assistant wrote the token
    document_ids: Tensor  # int64 [T], 0, 1, 2, ... in order; -1 for padding
    position_ids: Tensor  # int64 [T], starts at 0 in every document and ascends
    aux_hidden_states: Tensor  # target dtype [T, A, Ht]
    final_hidden_states: Tensor  # target dtype [T, Ht], the last layer's output before the final norm

    def to(
        self, device: torch.device, dtype: torch.dtype | None = None, *, states: bool = True
    ) -> "PackedBatch":
        """Return the batch on `device`, with hidden states cast to `dtype` when it is given.

        Args:
            states: False leaves the hidden states where they are, for `captured_rows`.
        """
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in moved.items():
            if states or name not in STATES:
                # What a GPU copies to the host is read at once, so the host waits for it.
                moved[name] = value.to(device, non_blocking=device.type != "cpu")
            if states and name in STATES and dtype is not None:
                moved[name] = moved[name].to(dtype)
        return PackedBatch(**moved)


def captured_rows(states: Tensor, rows: Tensor, host_rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return hidden states at some rows, on the rows' device; states that are on the CPU are copied there.

    Args:
        states: [T, ...]; from pinned memory the device copies consecutive rows without the host.
        rows: int64 [n].
        host_rows: the same on the CPU.
    """
    if states.device == rows.device:
        return states[rows].to(dtype)
    found = torch.empty(len(rows), *states.shape[1:], dtype=states.dtype, device=rows.device)
    for part, source in consecutive(host_rows):
        found[part].copy_(states[source].pin_memory(), non_blocking=True)
    return found.to(dtype)


def consecutive(rows: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield for each stretch of consecutive rows, int64 [n], their indices among the rows and the rows."""
    start = 0
    for part in rows.tensor_split(torch.nonzero(rows.diff() != 1).squeeze(1) + 1):
        if len(part):
            yield slice(start, start + len(part)), slice(int(part[0]), int(part[-1]) + 1)
        start += len(part)


def supervised_drafts(loss_mask: Tensor, document_ids: Tensor, num_steps: int) -> Tensor:
    """Return the (row, step) pairs that are drafts which serving would make.

    Serving drafts only after a token that the target itself sampled. So (t, k) is supervised when the
    assistant wrote every token of x[t+1] .. x[t+2+k], in row t's document.

    Args:
        loss_mask: bool [T].
        document_ids: int64 [T], grouped by document.

    Returns:
        bool [T, num_steps]; a step is true only where the step before is.
    """
    num_rows = loss_mask.shape[0]
    supervised = loss_mask.new_zeros(num_rows, num_steps)
    running = loss_mask[1:]  # whether the assistant wrote x[t+1] .. x[t+1+k]
    for step in range(num_steps):
        ahead = 2 + step
        if ahead >= num_rows:
            break
        same = document_ids[ahead:] == document_ids[: num_rows - ahead]
        running = running[: num_rows - ahead] & loss_mask[ahead:] & same
        supervised[: num_rows - ahead, step] = running
    return supervised


def sampled(supervised: Tensor, most: int | None, draw: int = 0) -> tuple[Tensor, float]:
    """Return the pairs of at most `most` rows, and how many rows each of them stands for.

    Every row is kept with the same probability. They are runs at equal distances, which are longer than
    a single row because attention takes consecutive queries together.

    Args:
        supervised: bool [T, K].
        most: None keeps all.
        draw: a random integer, much larger than T.
    """
    rows = step_rows(supervised)[0]
    if most is None or len(rows) <= most:
        return supervised, 1.0
    num_runs = min(max(1, most // _RUN), _MOST_RUNS)
    length = most // num_runs
    starts = (draw % len(rows) + len(rows) * torch.arange(num_runs)) // num_runs
    # The first row follows the last, so that those at the ends have the same probability.
    kept = rows[(starts[:, None] + torch.arange(length)).flatten() % len(rows)]
    found = torch.zeros_like(supervised)
    found[kept] = supervised[kept]
    return found, len(rows) / len(kept)


def step_rows(supervised: Tensor) -> list[Tensor]:
    """Return the rows that each step rolls out, int64 [R_k]. bool [T, K] -> K tensors."""
    return [torch.nonzero(column).squeeze(1) for column in supervised.unbind(1)]
