"""The learning rate: the rule for its peak, and that of each step."""

import math
from dataclasses import dataclass, replace

from eagle31.model.config import DrafterConfig
from train.config.training import OptimConfig

# 1e-4 at a hidden size of 4096, which EAGLE 3 and SpecForge publish for 8B targets.
ADAMW_RATE_TIMES_WIDTH = 0.4
# 6e-4 at 4096, which DeepSpec publishes for DSpark drafters of five layers.
DSPARK_RATE_TIMES_WIDTH = 2.4
# Within the published rates of 0.02 to 0.05. An update's spectral norm does not depend on the width.
MATRIX_RATE = 0.03


def rule_lr(drafter: DrafterConfig) -> float:
    """Return AdamW's peak learning rate: `0.4 / hidden_size / sqrt(num_hidden_layers)`; DSpark's has no root.

    AdamW changes every element by about the rate, and a product with H elements that change together by H
    times the rate. So a rate of c / H changes hidden states equally at every width. c is the published rate
    times the published width. The residual branches of L layers add up; the root lets their sum change less
    than in proportion to L.

    Sources: Yang and Hu, Feature learning in infinite-width neural networks (2021), and Yang et al., Tensor
    programs V (2022), for the width; Yang et al., Tensor programs VI (2023), for the depth. No ablation here
    supports the depth: drafters have one layer. docs/training.md has one for DSpark's rate.
    """
    if drafter.dspark is not None:
        return DSPARK_RATE_TIMES_WIDTH / drafter.hidden_size
    return ADAMW_RATE_TIMES_WIDTH / drafter.hidden_size / drafter.num_hidden_layers**0.5


def rule_matrix_lr(drafter: DrafterConfig) -> float:
    """Return the peak learning rate of Muon's matrices: `0.03 / sqrt(num_hidden_layers)`.

    It does not depend on the width, because an update is scaled to a spectral norm that fits the widths.

    Sources: Keller Jordan et al., Muon: an optimizer for hidden layers in neural networks (2024), and the
    ablation in docs/study.md, for the value; Yang, Simon and Bernstein, A spectral condition for feature
    learning (2023), for the width; see `rule_lr` for the depth.
    """
    return MATRIX_RATE / drafter.num_hidden_layers**0.5


def with_rates(optim: OptimConfig, drafter: DrafterConfig) -> OptimConfig:
    """Return the settings with the rule's rate for each rate that is null."""
    return replace(
        optim,
        lr=rule_lr(drafter) if optim.lr is None else optim.lr,
        matrix_lr=rule_matrix_lr(drafter) if optim.matrix_lr is None else optim.matrix_lr,
    )


def described(optim: OptimConfig, drafter: DrafterConfig) -> str:
    """Return the rates in words, and which of them are the rule's."""
    complete = with_rates(optim, drafter)
    names = ["lr", "matrix_lr"] if optim.name.value == "muon" else ["lr"]
    parts = [
        f"{name} {getattr(complete, name):.3g}{' (rule)' if getattr(optim, name) is None else ''}"
        for name in names
    ]
    return f"{optim.name.value}, {', '.join(parts)}"


@dataclass(frozen=True)
class LearningRate:
    """A linear warm-up to `peak`, then the schedule's course to 0.

    Source: warmup-stable-decay of MiniCPM (arXiv 2404.06395, section 4).

    Args:
        schedule: "linear", "cosine" or "wsd".
        decay_start: the first step whose rate falls, with schedule "wsd".
    """

    peak: float
    schedule: str
    warmup_steps: int
    max_steps: int
    decay_start: int = 0

    def at(self, step: int) -> float:
        """Return the rate of an optimizer step, from 0. The first step's rate is already above 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        first = self.warmup_steps
        if self.schedule == "wsd":
            first = max(self.decay_start, first)
        # The last step's rate is above the final one.
        progress = max(step - first, 0) / max(self.max_steps - first, 1)
        match self.schedule:
            case "linear" | "wsd":
                shape = 1.0 - progress
            case "cosine":
                shape = 0.5 * (1.0 + math.cos(math.pi * progress))
            case _:
                raise AssertionError(self.schedule)
        return self.peak * shape
