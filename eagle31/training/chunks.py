"""The loss of a long row, chunk by chunk: activations are those of one chunk.

With one decoder layer, the keys and values of step 0 are functions of each captured row alone, and drafts
depend on nothing but them. So the keys of the whole row are computed first, without a graph. Then each chunk
of rows is rolled out and differentiated, which adds to the gradients of the keys, and its graph is dropped.
Last, the keys are computed once more, a part at a time, and their gradients go through them.

Ranks can share a row in this way. Each computes a part of the keys, and all gather them; for MLA what is
gathered are the latents, from which each makes the keys. Each rolls a part of the drafts out. Then the keys'
gradients are summed over the ranks, and each goes on with those of its part.

All of this is the forward pass of one autograd function, which keeps the weights' gradients; so to DeepSpeed
it is one module with one backward pass, however many chunks a rank has.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from eagle31.kernels.elementwise import widened
from eagle31.kernels.plain_attention import LayerKeys
from eagle31.model.drafter import Drafter
from eagle31.training.attention import key_attention
from eagle31.training.batch import PackedBatch
from eagle31.training.rollout import filled, prefill, row_parts
from eagle31.training.schedule import ChunkSchedule, RolloutSchedule, keys_of_share

# The loss of a chunk and its sums, from the states at its rows and the keys of all rows.
ChunkLoss: TypeAlias = Callable[[ChunkSchedule, Tensor, list[LayerKeys]], tuple[Tensor, Tensor]]


def in_chunks(
    drafter: Drafter,
    embed_tokens: Tensor,
    batch: PackedBatch,
    schedule: RolloutSchedule,
    loss_of: ChunkLoss,
    row_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum of the chunks' losses, and of their sums.

    Gradients of weights and keys are added up in float32 or wider.

    Args:
        row_group: the ranks that share the row, which all call with a drafter of one layer.
    """
    weights = list(_weights(drafter))
    row = _PackedRow(drafter, embed_tokens, batch, schedule, weights, loss_of, row_group)
    return _InChunks.apply(row, *weights)


class _InChunks(torch.autograd.Function):
    """The tensor inputs are the weights."""

    @staticmethod
    def forward(ctx: Any, row: "_PackedRow", *weights: Tensor) -> tuple[Tensor, Tensor]:
        total, sums = row.run()
        ctx.grads, ctx.dtypes = row.grads, [weight.dtype for weight in weights]
        ctx.mark_non_differentiable(sums)
        return total, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.grads is not None, "the loss can be differentiated only once"
        grads, ctx.grads = ctx.grads, None
        scaled = (
            None if one is None else one.mul_(grad).to(dtype)
            for one, dtype in zip(grads, ctx.dtypes, strict=True)
        )
        return None, *scaled


@dataclass
class _PackedRow:
    """One packed row's loss and the gradients of the weights.

    Tensors of all key rows have some more rows where ranks share the packed row, so that each has as many.
    """

    drafter: Drafter
    embed_tokens: Tensor
    batch: PackedBatch
    schedule: RolloutSchedule
    weights: Sequence[Tensor]
    loss_of: ChunkLoss
    group: dist.ProcessGroup | None

    def __post_init__(self) -> None:
        drafter, schedule, group = self.drafter, self.schedule, self.group
        self.attend = key_attention(schedule, drafter, self.embed_tokens)
        self.attention = drafter.decoder_layers[-1].self_attn
        self.num_keys = self.num_rows = len(schedule.key_rows)
        if group is not None:
            assert drafter.prefills_rows_alone
            self.num_rows = group.size() * keys_of_share(self.num_keys, group.size())
        self.grads: list[Tensor | None] = [None] * len(self.weights)

    def run(self) -> tuple[Tensor, Tensor]:
        own, every = (
            row_parts(self.drafter, rows, self.schedule.chunk_rows)
            for rows in (self.schedule.key_part, slice(0, self.num_keys))
        )
        state, *before, key, value = self._gathered(filled(self.num_rows, own, self._prefilled))
        keys = [*before, key, value]
        if self.attention.compresses:
            keys[-2:] = filled(
                self.num_rows, every, lambda part: self.attention.expanded((key[part], value[part]))
            )
        grad_state = torch.zeros_like(state)
        grad_keys = [torch.zeros_like(x, dtype=widened(x.dtype)) for x in keys]
        found = [self._chunk(chunk, state, keys, grad_state, grad_keys) for chunk in self.schedule.chunks]
        del state, keys
        if self.attention.compresses:
            grad_keys[-2:] = self._through_expansion(every, key, value, grad_keys[-2:])
        offset, grads = self.schedule.key_part.start, self._summed([grad_state, *grad_keys])
        for part in own:
            with torch.enable_grad():
                outputs = self._prefilled(part)
            of_part = [x[part.start - offset : part.stop - offset].to(grad_state.dtype) for x in grads]
            self._add(torch.autograd.grad(outputs, self.weights, of_part, allow_unused=True))
        totals, sums = (torch.stack(one) for one in zip(*found, strict=True))
        return totals.sum(), sums.sum(0)

    def _prefilled(self, part: slice) -> list[Tensor]:
        """Return the state, keys and values of layers before the last, and the last one's compressed ones."""
        rows, host_rows = self.schedule.key_rows[part], self.schedule.key_rows_host[part]
        found = prefill(self.drafter, self.embed_tokens, self.batch, rows, host_rows, self.attend)
        before = (x for layer in found.keys for x in (layer.keys, layer.values))
        return [found.state, *before, *found.compressed]

    def _gathered(self, found: list[Tensor]) -> list[Tensor]:
        """Fill in the other ranks' rows."""
        if self.group is not None:
            for x in found:
                dist.all_gather_single(x, x.chunk(self.group.size())[self.group.rank()], self.group)
        return found

    def _summed(self, grads: list[Tensor]) -> list[Tensor]:
        """Return the sums over the ranks at this rank's rows."""
        if self.group is None:
            return grads
        own = [x.new_empty(len(x) // self.group.size(), *x.shape[1:]) for x in grads]
        for share, x in zip(own, grads, strict=True):
            dist.reduce_scatter_single(share, x, group=self.group)
        return own

    def _through_expansion(
        self, parts: Sequence[slice], key: Tensor, value: Tensor, grads: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the gradients of the compressed keys and values from those of the expanded ones."""
        found = [torch.zeros_like(x, dtype=widened(x.dtype)) for x in (key, value)]
        for part in parts:
            leaves = key[part].requires_grad_(), value[part].requires_grad_()
            with torch.enable_grad():
                outputs = self.attention.expanded(leaves)
            of_part = [grad[part].to(key.dtype) for grad in grads]
            found[0][part], found[1][part], *of_weights = torch.autograd.grad(
                outputs, [*leaves, *self.weights], of_part, allow_unused=True
            )
            self._add(of_weights)
        return found

    def _chunk(
        self,
        chunk: ChunkSchedule,
        state: Tensor,
        keys: Sequence[Tensor],
        grad_state: Tensor,
        grad_keys: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Differentiate a chunk's loss; return it and its sums. Attention adds to the keys' gradients."""
        leaf = state[chunk.query_index].requires_grad_()
        key, value, of_key, of_value = (
            [x[: self.num_keys] for x in found]
            for found in (keys[::2], keys[1::2], grad_keys[::2], grad_keys[1::2])
        )
        with torch.enable_grad():
            layers = [
                LayerKeys(*of_layer[:2], sums=of_layer[2:])
                for of_layer in zip(key, value, of_key, of_value, strict=True)
            ]
            total, sums = self.loss_of(chunk, leaf, layers)
        of_rows, *found = torch.autograd.grad(total, [leaf, *self.weights], allow_unused=True)
        if of_rows is not None:
            grad_state[chunk.query_index] = of_rows
        self._add(found)
        return total.detach(), sums

    def _add(self, grads: Sequence[Tensor | None]) -> None:
        for index, grad in enumerate(grads):
            if grad is None:
                continue
            before = self.grads[index]
            if before is None:
                self.grads[index] = grad.to(widened(grad.dtype), copy=True)
            else:
                before += grad


def _weights(drafter: nn.Module) -> Iterator[Tensor]:
    """Yield the weights, which may be parameters or, rounded, attributes."""
    for module in drafter.modules():
        for value in (*module._parameters.values(), *vars(module).values()):
            if isinstance(value, Tensor) and value.requires_grad:
                yield value
