"""A stand-in for the flash kernel for CUDA, by its definition."""

import torch
from torch import Tensor


def by_definition(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    scale: float,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return probabilities and log-sum-exp as the packed CUDA kernel documents them."""
    rows, width = torch.arange(len(query)), torch.arange(len(keys))
    run_q = torch.searchsorted(starts_q, rows, right=True) - 1
    run_k = torch.searchsorted(starts_k, width, right=True) - 1
    # Bottom-right alignment: the last query reads the last key.
    shift = (starts_k[1:] - starts_q[1:])[run_q]
    last = (rows + shift)[:, None]
    visible = (run_q[:, None] == run_k[None]) & (width[None] <= last)
    if window_size_left is not None:
        assert window_size_right == 0
        visible &= width[None] >= last - window_size_left
    group = query.shape[1] // keys.shape[1]
    scores = torch.einsum("qhd,khd->qhk", query, keys.repeat_interleave(group, 1)) * scale
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    return scores.softmax(-1), scores.logsumexp(-1)


class CudaKernel:
    """A stand-in for `aten._flash_attention_{forward,backward}`, by their definition."""

    def _flash_attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, cq: Tensor, ck: Tensor, *_: object, scale: float, **window: int
    ):
        assert q.shape[-1] == k.shape[-1]
        probs, lse = by_definition(q, k, v, cq, ck, scale, **window)
        out = torch.einsum("qhk,khd->qhd", probs, v.repeat_interleave(q.shape[1] // k.shape[1], 1))
        return out.contiguous(), lse.t().contiguous(), None, None, None

    def _flash_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cq: Tensor, ck: Tensor,
        *_: object, scale: float, **window: int,
    ):  # fmt: skip
        assert q.shape[-1] == k.shape[-1]
        assert v.shape[-1] == grad.shape[-1] == out.shape[-1]
        group = q.shape[1] // k.shape[1]
        wide_k, wide_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        probs, step_lse = by_definition(q, k, v, cq, ck, scale, **window)
        probs = probs * (step_lse - lse.t()).exp().unsqueeze(-1)  # the kernel uses the lse that it is given
        slope = torch.einsum("qhd,khd->qhk", grad, wide_v) - (grad * out).sum(-1, keepdim=True)
        slope = slope * probs * scale
        heads = (len(k), k.shape[1], group)
        grad_k = torch.einsum("qhk,qhd->khd", slope, q).view(*heads, -1).sum(2)
        grad_v = torch.einsum("qhk,qhd->khd", probs, grad).view(*heads, -1).sum(2)
        return torch.einsum("qhk,khd->qhd", slope, wide_k).contiguous(), grad_k, grad_v
