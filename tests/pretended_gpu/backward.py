"""Backward passes without autograd's engine, which starts no thread for a device that is not there.

The nodes are autograd's, so a backward pass dispatches what the engine would dispatch.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction


def backward(*outputs: Tensor, gradients: Sequence[Tensor | None] = (None,), with_hooks: bool = True) -> None:
    """Add the gradients of the outputs to the `grad` of the leaves, as `torch.autograd.backward` does.

    Args:
        with_hooks: call the leaves' hooks after it.
    """
    received: dict[Any, dict[int, Tensor]] = defaultdict(dict)
    for output, gradient in zip(outputs, gradients, strict=True):
        received[output.grad_fn][output.output_nr] = torch.ones_like(output) if gradient is None else gradient
    with torch.no_grad():
        for node in _in_order([*received]):
            of_node = received.pop(node, {})
            if not of_node and not isinstance(node, BackwardCFunction):
                continue
            targets = [target for target in node.next_functions if target[0] is not None]
            for (target, number), gradient in zip(targets, _call(node, of_node, with_hooks), strict=True):
                if gradient is None:
                    continue
                gradient = _checked(gradient, target._input_metadata[number])
                before = received[target].get(number)
                received[target][number] = gradient if before is None else before + gradient


def grad(
    outputs: Tensor | Sequence[Tensor],
    leaves: Sequence[Tensor],
    gradients: Sequence[Tensor | None] = (None,),
    allow_unused: bool = False,
) -> list[Tensor | None]:
    """Return the gradients of the leaves, as `torch.autograd.grad` does."""
    before = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    backward(*([outputs] if isinstance(outputs, Tensor) else outputs), gradients=gradients, with_hooks=False)
    found = [leaf.grad for leaf in leaves]
    for leaf, old in zip(leaves, before, strict=True):
        leaf.grad = old
    assert allow_unused or None not in found
    return found


def _in_order(roots: Sequence[Any]) -> Iterator[Any]:
    """Yield each node after all nodes that give it a gradient; of several the newest, as the engine does."""
    waiting: dict[Any, int] = defaultdict(int)
    found, stack = set(roots), [*roots]
    while stack:
        for target, _ in stack.pop().next_functions:
            if target is not None:
                waiting[target] += 1
                if target not in found:
                    found.add(target)
                    stack.append(target)
    ready = [root for root in roots if not waiting[root]]
    while ready:
        node = max(ready, key=lambda one: one._sequence_nr())
        ready.remove(node)
        yield node
        for target, _ in node.next_functions:
            if target is not None:
                waiting[target] -= 1
                if not waiting[target]:
                    ready.append(target)


def _call(node: Any, gradients: dict[int, Tensor], with_hooks: bool) -> Sequence[Tensor | None]:
    """Return the gradients of the inputs that need one; a leaf's gradient is added to it."""
    if hasattr(node, "variable"):
        leaf, gradient = node.variable, gradients[0]
        leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        for hook in (leaf._post_accumulate_grad_hooks or {}).values() if with_hooks else ():
            hook(leaf)
        return ()
    wanted = range(len(node._input_metadata))
    if isinstance(node, BackwardCFunction):
        # The engine gives zeros for outputs that have no gradient.
        result = node.apply(*(gradients[i] if i in gradients else _zeros(node, i) for i in wanted))
        results = result if isinstance(result, tuple) else (result,)
        return [x for x, needed in zip(results, node.needs_input_grad, strict=True) if needed]
    result = node(*(gradients.get(i) for i in wanted))
    results = result if isinstance(result, tuple) else (result,)
    return [x for x, target in zip(results, node.next_functions, strict=True) if target[0] is not None]


def _zeros(node: Any, number: int) -> Tensor:
    metadata = node._input_metadata[number]
    return torch.zeros(metadata.shape, dtype=metadata.dtype, device=metadata.device)


def _checked(gradient: Tensor, metadata: Any) -> Tensor:
    """Return the gradient in the shape and dtype of what it is the gradient of."""
    assert gradient.device == metadata.device, f"a gradient on {gradient.device}, not {metadata.device}"
    if gradient.shape != metadata.shape:
        gradient = gradient.sum_to_size(metadata.shape)
    return gradient.to(metadata.dtype)
