"""The recipe's schema for the training data."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from data.conversations.choices import Turns, check_template_kwargs
from eagle31.errors import UserError
from train.config.setting import setting

SELF = "self"  # data.train: prompts that the target writes
MAX_TEMPERATURE = 2  # vLLM refuses higher ones


@dataclass
class RegenerateConfig:
    """Replacement of the assistant's turns by completions that the target writes itself."""

    enabled: bool = setting(
        True, "Whether the assistant's turns are replaced. Prompts without answers are answered too."
    )
    max_new_tokens: int = setting(512, "Length limit of a turn, in tokens.", ge=1)
    temperature: float | None = setting(
        None,
        "Sampling temperature; 0 is greedy. null: the sampling that the target's generation_config "
        "recommends.",
        ge=0,
        le=MAX_TEMPERATURE,
    )
    batch_size: int = setting(
        16, "Prompts of one forward pass with target.engine=hf; vLLM batches by itself.", ge=1
    )


@dataclass
class SelfPromptsConfig:
    """The prompts that the target writes itself with data.train=self."""

    num: int = setting(
        10_000,
        "Prompts that the target writes. Those without an end, without text, with special tokens and "
        "repeated ones are left out.",
        ge=1,
        le=1_000_000,
    )
    temperature: float = setting(1.0, "Sampling temperature.", gt=0, le=MAX_TEMPERATURE)
    top_p: float = setting(0.95, "Probability of the likeliest tokens that are sampled from.", gt=0, le=1)
    max_new_tokens: int = setting(96, "Length limit of a prompt, in tokens.", ge=1)
    system_prompt: str | None = setting(
        None, "System prompt of all conversations. null: what the chat template writes without one."
    )


@dataclass
class SourceConfig:
    """One of several sources of training conversations, under a name that is chosen freely."""

    source: str = setting(MISSING, "Training conversations, as data.train.")
    split: str = setting("train", "Split of a Hub dataset, or of a directory of files.")
    subset: str | None = setting(None, "Subset of a Hub dataset that has several.")
    revision: str | None = setting(None, "As data.revision.")
    prompt_column: str | None = setting(
        None, "Column of the user's text, or of messages. null: found by name."
    )
    response_column: str | None = setting(
        None, "Column of the assistant's text. null: found by name, or none with prompt_column alone."
    )
    weight: float | None = setting(
        None,
        "Share of the training conversations, relative to the weights of the other sources. Either all "
        "sources have one or none; null: all conversations are used.",
        gt=0,
    )
    max_conversations: int | None = setting(
        None, "The most conversations that are used, chosen at random.", ge=1
    )


@dataclass
class DataConfig:
    """The conversations that training and evaluation use."""

    train: str | None = setting(
        MISSING,
        "Training conversations, or prompts alone with data.regenerate.enabled: JSONL, JSON, CSV, Parquet or "
        'text files (a path, a pattern, a URL or a directory), or Hub id of a dataset. "embedded": those of '
        'the embedded target. "self": prompts that the target writes itself, for data.regenerate. null: '
        "those of data.sources.",
    )
    sources: dict[str, SourceConfig] = setting(
        {}, "Several sources of training conversations, by name, in place of data.train."
    )
    eval: str | None = setting(
        None, "Source of the held-out prompts, as data.train. null: held out of data.train."
    )
    subset: str | None = setting(None, "Subset of a Hub dataset that has several, such as main of gsm8k.")
    split: str = setting("train", "Split of a Hub dataset, or of a directory of files, in data.train.")
    eval_split: str = setting("test", "Split of a Hub dataset, or of a directory of files, in data.eval.")
    revision: str | None = setting(
        None,
        "Branch, tag or commit of a Hub dataset in data.train. null: the default branch. A commit keeps the "
        "run's data, whatever is uploaded before it is resumed.",
    )
    eval_revision: str | None = setting(None, "Branch, tag or commit of a Hub dataset in data.eval.")
    prompt_column: str | None = setting(
        None, "Column of the user's text, or of messages. null: found by name."
    )
    response_column: str | None = setting(
        None, "Column of the assistant's text. null: found by name, or none with prompt_column alone."
    )
    max_malformed_fraction: float = setting(
        0.01,
        "Largest fraction of the rows of a source that may be malformed. They are left out and listed.",
        ge=0,
        le=1,
    )
    near_duplicates: float | None = setting(
        None,
        "Similarity from which a conversation is a near-duplicate of an earlier one and left out: the "
        "fraction of the sequences of five words of either that both have. null: none is left out.",
        gt=0,
        le=1,
    )
    evaluation_sets: str | None = setting(
        None,
        "Further prompts that training must not see, next to those of data.eval: a file, a dataset, or a "
        ".yaml file of several, such as recipes/benchmarks.yaml. null: none.",
    )
    max_samples: int | None = setting(None, "Number of training samples, chosen at random. null: all.", ge=1)
    turns: Turns = setting(Turns.all, "Which assistant turns are trained on.")
    template_kwargs: dict[str, Any] = setting(
        {}, "Arguments of the chat template, such as {enable_thinking: false}. Serving must use the same."
    )
    max_tokens: int = setting(2048, "Length limit of a sample, in tokens; longer ones are cut.", ge=1)
    template_probability: float = setting(
        0.0,
        "Fraction of the training conversations that another chat template renders: with other names of the "
        "roles, with more white space, or in plain text. docs/study.md has an ablation.",
        ge=0,
        le=1,
    )
    num_validation: int = setting(128, "Held-out prompts from which the best checkpoint is chosen.", ge=1)
    num_test: int = setting(256, "Held-out prompts for the final evaluation.", ge=1)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    self_prompts: SelfPromptsConfig = field(default_factory=SelfPromptsConfig)


def check_data(data: DataConfig) -> None:
    """Raise UserError for values that no stage could use."""
    check_template_kwargs(data.template_kwargs, "data.template_kwargs.")
    check_sources(data)
    if data.train == SELF:
        check_self_prompts(data)


def check_sources(data: DataConfig) -> None:
    """Raise UserError for sources that contradict each other, and for shares that no source can have."""
    if data.train is None and not data.sources:
        raise UserError("data.train", None, "Give training conversations here or in data.sources.")
    if data.train is not None and data.sources:
        remedy = f"data.sources has {', '.join(data.sources)} too; set data.train=null, or leave them out."
        raise UserError("data.train", data.train, remedy)
    weighted = [name for name, source in data.sources.items() if source.weight is not None]
    for name, source in data.sources.items():
        key = f"data.sources.{name}"
        if source.weight is None and weighted:
            raise UserError(f"{key}.weight", None, f"Give a weight, because {weighted[0]} has one.")


def check_self_prompts(data: DataConfig) -> None:
    """Raise UserError for prompts of the target without answers, or of which none could be trained on."""
    settings = data.self_prompts
    if not data.regenerate.enabled:
        remedy = "The target writes prompts without answers; set data.regenerate.enabled=true, or data=self."
        raise UserError("data.train", data.train, remedy)
    held_out = data.num_validation + data.num_test
    if data.eval is None and settings.num <= held_out:
        remedy = f"{held_out} of them are held out; raise it, or lower data.num_validation and data.num_test."
        raise UserError("data.self_prompts.num", settings.num, remedy)
    if settings.max_new_tokens >= data.max_tokens:
        remedy = f"A prompt and its answer must fit data.max_tokens ({data.max_tokens}); lower it."
        raise UserError("data.self_prompts.max_new_tokens", settings.max_new_tokens, remedy)
