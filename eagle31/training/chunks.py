"""The loss of a long row, chunk by chunk: activations are those of one chunk.

With one decoder layer, the keys and values of step 0 are functions of each captured row alone, and drafts
depend on nothing but them. So the keys of the whole row are computed first, without a graph. Then each chunk
of rows is rolled out and differentiated, which adds to the gradients of the keys, and its graph is dropped.
Last, the keys are computed once more, a part at a time, and their gradients go through them.

All of this is the forward pass of one autograd function, which keeps the weights' gradients; so to DeepSpeed
it is one module with one backward pass, however many chunks a rank has.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from eagle31.kernels.elementwise import widened
from eagle31.model.attention import LayerKeys
from eagle31.model.drafter import Drafter
from eagle31.training.batch import PackedBatch
from eagle31.training.rollout import Prefill, prefill
from eagle31.training.schedule import ChunkSchedule, RolloutSchedule

# The loss of a chunk and its sums, from the states at its rows and the keys of all rows.
ChunkLoss: TypeAlias = Callable[[ChunkSchedule, Tensor, list[LayerKeys]], tuple[Tensor, Tensor]]


def in_chunks(
    drafter: Drafter, embed_tokens: Tensor, batch: PackedBatch, schedule: RolloutSchedule, loss_of: ChunkLoss
) -> tuple[Tensor, Tensor]:
    """Return the sum of the chunks' losses, and of their sums.

    Gradients of weights and keys are added up in float32 or wider.
    """
    weights = list(_weights(drafter))
    row = _Row(drafter, embed_tokens, batch, schedule, weights, loss_of)
    return _InChunks.apply(row, *weights)


class _InChunks(torch.autograd.Function):
    """The tensor inputs are the weights."""

    @staticmethod
    def forward(ctx: Any, row: "_Row", *weights: Tensor) -> tuple[Tensor, Tensor]:
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


class _Row:
    """One row's loss and the gradients of the weights."""

    def __init__(
        self,
        drafter: Drafter,
        embed_tokens: Tensor,
        batch: PackedBatch,
        schedule: RolloutSchedule,
        weights: Sequence[Tensor],
        loss_of: ChunkLoss,
    ) -> None:
        self.drafter, self.embed_tokens, self.batch = drafter, embed_tokens, batch
        self.schedule, self.weights, self.loss_of = schedule, weights, loss_of
        self.grads: list[Tensor | None] = [None] * len(weights)

    def run(self) -> tuple[Tensor, Tensor]:
        parts = list(self._parts())
        state, *keys = self._prefilled(parts)
        grad_state = torch.zeros_like(state)
        grad_keys = [torch.zeros_like(x, dtype=widened(x.dtype)) for x in keys]
        totals, sums = [], []
        for chunk in self.schedule.chunks:
            total, of_chunk = self._chunk(chunk, state, keys, grad_state, grad_keys)
            totals.append(total)
            sums.append(of_chunk)
        del state, keys
        for part in parts:
            with torch.enable_grad():
                outputs = _tensors(self._prefill(part))
            grads = [grad_state[part], *(x[part].to(grad_state.dtype) for x in grad_keys)]
            self._add(torch.autograd.grad(outputs, self.weights, grads, allow_unused=True))
        return torch.stack(totals).sum(), torch.stack(sums).sum(0)

    def _prefill(self, part: slice) -> Prefill:
        return prefill(self.drafter, self.embed_tokens, self.batch, self.schedule, part)

    def _parts(self) -> Iterator[slice]:
        """Yield parts of the key rows that are as large as a chunk; one where each row needs the others."""
        num_rows, size = max(len(self.schedule.key_rows), 1), self.schedule.chunk_rows
        if size is None or len(self.drafter.layers) > 1:
            size = num_rows
        for start in range(0, num_rows, size):
            yield slice(start, start + size)

    def _prefilled(self, parts: Sequence[slice]) -> list[Tensor]:
        """Return the state and each layer's keys and values at all key rows, without a graph."""
        whole: list[Tensor] = []
        for part in parts:
            found = _tensors(self._prefill(part))
            whole = whole or [x.new_empty(len(self.schedule.key_rows), *x.shape[1:]) for x in found]
            for x, rows in zip(whole, found, strict=True):
                x[part] = rows
        return whole

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
        of_layers = zip(keys[::2], keys[1::2], grad_keys[::2], grad_keys[1::2], strict=True)
        with torch.enable_grad():
            layers = [
                LayerKeys(key, value, sums=(of_key, of_value)) for key, value, of_key, of_value in of_layers
            ]
            total, sums = self.loss_of(chunk, leaf, layers)
        of_rows, *found = torch.autograd.grad(total, [leaf, *self.weights], allow_unused=True)
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


def _tensors(found: Prefill) -> list[Tensor]:
    return [found.state, *(x for layer in found.keys for x in (layer.keys, layer.values))]


def _weights(drafter: nn.Module) -> Iterator[Tensor]:
    """Yield the weights, which may be parameters or, rounded, attributes."""
    for module in drafter.modules():
        for value in (*module._parameters.values(), *vars(module).values()):
            if isinstance(value, Tensor) and value.requires_grad:
                yield value
