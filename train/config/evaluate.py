"""The recipe's schema for the evaluation of the exported drafter."""

from dataclasses import dataclass

from train.config.setting import setting

MAX_DRAFT_TOKENS = 64  # a longer draft is never accepted to its end, and each token of it costs a pass


@dataclass
class EvaluateConfig:
    """How the exported drafter is measured, on held-out prompts."""

    draft_tokens: int = setting(
        4,
        "Draft tokens per target forward (k). Checkpoints are chosen by the acceptance length at this "
        "length too, and replay measures every shorter draft as well, and drafts of up to 8 tokens. At "
        "most 64.",
        ge=1,
        le=MAX_DRAFT_TOKENS,
    )
    decoded_prompts: int = setting(
        8,
        "Test prompts that are decoded too, with the drafter. Replay measures acceptance on all of them. "
        "Decoding checks the replay and the completions, where a mistake would show in any prompt.",
        ge=1,
    )
    max_new_tokens: int = setting(256, "Length limit of a completion, in tokens.", ge=1)
