"""Which of the drafter's weights Muon updates as matrices."""

from collections.abc import Sequence

HEAD = "lm_head.weight"


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether Muon updates this weight of the drafter; AdamW updates the others.

    Muon is for matrices between hidden states. A norm's weight is a vector. A row of the draft head belongs
    to one token, and its gradient is as frequent as the token, which AdamW evens out.

    No module of the drafter has several projections in one weight, apart from MLA's down-projection of keys
    and values with its shared rotary key, as in DeepSeek's checkpoints; it counts as one matrix.

    Source: Keller Jordan et al., Muon: an optimizer for hidden layers in neural networks (2024).
    """
    return len(shape) == 2 and name != HEAD
