"""The recipe's schema for the evaluation of the exported drafter."""

from dataclasses import dataclass

from eagle31.errors import UserError, require_positive


@dataclass
class EvaluateConfig:
    """How speculative decoding with the exported drafter is measured, on held-out prompts."""

    # Draft tokens per target forward (k). Checkpoints are chosen by the acceptance length at this length too.
    draft_tokens: int = 4
    max_new_tokens: int = 256  # Length limit of a completion, in tokens.
    temperature: float = 1.0  # Temperature of the sampling pass, greater than 0. The greedy pass always runs.
    sampling: bool = True  # Whether to measure with sampling in addition to greedy decoding.
    untrained: bool = True  # Whether to measure the untrained drafter too, for comparison.


def check_evaluate(evaluate: EvaluateConfig) -> None:
    """Raise UserError for values that no evaluation could use."""
    require_positive(
        {
            "evaluate.draft_tokens": evaluate.draft_tokens,
            "evaluate.max_new_tokens": evaluate.max_new_tokens,
        }
    )
    if evaluate.temperature <= 0:
        remedy = "It must be greater than 0; set evaluate.sampling=false for greedy decoding only."
        raise UserError("evaluate.temperature", evaluate.temperature, remedy)
