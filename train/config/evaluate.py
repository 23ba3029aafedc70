"""The recipe's schema for the evaluation of the exported drafter."""

from dataclasses import dataclass

from eagle31.errors import UserError, require_positive
from train.config.limits import check_temperature


@dataclass
class EvaluateConfig:
    """How the exported drafter is measured, on held-out prompts."""

    # Draft tokens per target forward (k). Checkpoints are chosen by the acceptance length at this length too,
    # and replay measures every shorter draft as well, and drafts of up to 8 tokens. At most 64.
    draft_tokens: int = 4
    # Test prompts that are decoded too, with the drafter and without it. Replay measures acceptance on all of
    # them. Decoding checks the replay and the completions, where a mistake would show in any prompt, and
    # measures the time, whose interval needs a few.
    decoded_prompts: int = 8
    max_new_tokens: int = 256  # Length limit of a completion, in tokens.
    temperature: float = 1.0  # Temperature for sampling, greater than 0. Temperature 0 is always measured.
    # Whether to measure at this temperature too: the target samples a completion of every test prompt.
    sampling: bool = True
    untrained: bool = True  # Whether to replay the untrained drafter too, for comparison.


def check_evaluate(evaluate: EvaluateConfig) -> None:
    """Raise UserError for values that no evaluation could use."""
    require_positive(
        {
            "evaluate.draft_tokens": evaluate.draft_tokens,
            "evaluate.decoded_prompts": evaluate.decoded_prompts,
            "evaluate.max_new_tokens": evaluate.max_new_tokens,
        }
    )
    if evaluate.temperature <= 0:
        remedy = "It must be greater than 0; set evaluate.sampling=false for greedy decoding only."
        raise UserError("evaluate.temperature", evaluate.temperature, remedy)
    check_temperature("evaluate.temperature", evaluate.temperature)
