"""Rows that ranks share: they take turns in reading one, and each gets the states that it computes with."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from data.samples import StateShape
from eagle31.training.batch import PackedBatch
from eagle31.training.schedule import DraftCosts, RowShare, needed_states, row_shares

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class SharedRows:
    """Hands each row on to the other ranks of a group, with the hidden states that each computes with.

    Args:
        group: on gloo; each rank's exchanges are in one thread.
        shape: of the states.
        key_reach: of the schedule.
        costs: by which the drafts are divided.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        shape: StateShape,
        key_reach: int | None,
        costs: DraftCosts,
    ) -> None:
        self.group, self.shape, self.key_reach, self.costs = group, shape, key_reach, costs
        self.ranks = dist.get_process_group_ranks(group)

    def exchange(
        self, batch: PackedBatch | None, reader: int, drafts_of: Callable[[PackedBatch], Tensor]
    ) -> tuple[PackedBatch, RowShare]:
        """Return the row, and what this rank computes of it. Every rank of the group calls.

        Args:
            batch: the row on the CPU, at the rank of the group that has read it.
            drafts_of: returns the (row, step) pairs of a row that are rolled out, bool [T, K].

        Returns:
            At the other ranks the row's hidden states have memory where their own share needs them.
        """
        source = self.ranks[reader]
        sizes = torch.zeros(2, dtype=torch.int64)
        if batch is not None:
            sizes[0], sizes[1] = len(batch.input_ids), _DTYPES.index(batch.aux_hidden_states.dtype)
        dist.broadcast(sizes, source, self.group)
        row = self._empty(*sizes.tolist()) if batch is None else batch
        for tensor in (row.input_ids, row.loss_mask, row.document_ids, row.position_ids):
            dist.broadcast(tensor, source, self.group)
        of_row = drafts_of(row), row.document_ids, self.key_reach
        shares = row_shares(*of_row, self.costs, len(self.ranks))
        own = self.group.rank()
        for index, share in enumerate(shares):
            if index == reader or own not in (index, reader):
                continue
            states_of_row = row.aux_hidden_states, row.final_hidden_states
            for states, rows in zip(states_of_row, needed_states(*of_row, share), strict=True):
                if own == reader:
                    dist.send(states[rows], self.ranks[index], self.group)
                else:
                    states[rows] = self._received(states, len(rows), source)
        return row, shares[own]

    def _received(self, states: Tensor, num_rows: int, source: int) -> Tensor:
        received = states.new_empty(num_rows, *states.shape[1:])
        dist.recv(received, source, self.group)
        return received

    def _empty(self, num_tokens: int, dtype: int) -> PackedBatch:
        """Return a row to receive. The system gives the states' memory as it is written."""
        shape = self.shape
        aux = num_tokens, shape.num_aux_layers, shape.hidden_size
        ids = [torch.empty(num_tokens, dtype=torch.int64) for _ in range(3)]
        return PackedBatch(
            input_ids=ids[0],
            loss_mask=torch.empty(num_tokens, dtype=torch.bool),
            document_ids=ids[1],
            position_ids=ids[2],
            aux_hidden_states=torch.empty(aux, dtype=_DTYPES[dtype]),
            final_hidden_states=torch.empty(num_tokens, shape.hidden_size, dtype=_DTYPES[dtype]),
        )
