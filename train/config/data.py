"""The recipe's schema for the training data."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from data.conversations.choices import Overlong, Turns, check_template_kwargs
from data.conversations.perturbation import check_template
from eagle31.errors import UserError
from train.config.setting import setting


@dataclass
class RegenerateConfig:
    """Replacement of the assistant's turns by completions that the target writes itself."""

    enabled: bool = setting(False, "Whether the assistant's turns are replaced.")
    max_new_tokens: int = setting(512, "Length limit of a turn, in tokens.", ge=1)
    temperature: float = setting(0.0, "Sampling temperature; 0 is greedy.", ge=0, le=100)
    top_p: float = setting(
        1.0,
        "A token is sampled from the most likely tokens that together have this probability. 1: from all.",
        gt=0,
        le=1,
    )
    top_k: int = setting(0, "A token is sampled from this many of the most likely tokens. 0: from all.", ge=0)
    completions: int = setting(
        1,
        "Completions of each conversation, each of which the target writes independently of the others.",
        ge=1,
    )
    batch_size: int = setting(
        16, "Prompts of one forward pass with target.engine=hf; vLLM batches by itself.", ge=1
    )
    processes: int | None = setting(
        None,
        "Processes that run the target with target.engine=hf. null: one for each GPU of the node, and 1 "
        "on a CPU.",
        ge=1,
        le=4096,
    )


@dataclass
class AugmentConfig:
    """Training prompts under other conditions, each conversation by chance.

    Held-out prompts stay as they are. `scripts/evaluate --matrix` measures under these conditions, and
    docs/study.md has an ablation of each.
    """

    template_probability: float = setting(
        0.0, "Fraction of the conversations that another chat template renders.", ge=0, le=1
    )
    templates: list[str] = setting(
        ["renamed_roles", "extra_whitespace", "plain"],
        "The templates: renamed_roles, extra_whitespace, chatml, plain, or paths of templates.",
    )


@dataclass
class SourceConfig:
    """One of several sources of training conversations, under a name that is chosen freely."""

    source: str = setting(MISSING, "Training conversations, as data.train.")
    split: str = setting("train", "Split of a Hub dataset.")
    subset: str | None = setting(None, "Subset of a Hub dataset that has several.")
    prompt_column: str | None = setting(None, "Column of the user's text. null: found by name.")
    input_column: str | None = setting(
        None, "Column of a text that follows the user's. null: Alpaca's input, or none."
    )
    response_column: str | None = setting(None, "Column of the assistant's text. null: found by name.")
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
class EvaluationSetConfig:
    """Prompts that training must not see, under a name that is chosen freely."""

    source: str = setting(MISSING, "JSONL, JSON, CSV or Parquet file, or Hub id of a dataset.")
    split: str = setting("test", "Split of a Hub dataset.")
    subset: str | None = setting(None, "Subset of a Hub dataset that has several.")
    prompt_column: str | None = setting(None, "Column of the user's text. null: found by name.")


@dataclass
class DataConfig:
    """The conversations that training and evaluation use."""

    train: str | None = setting(
        MISSING,
        'Training conversations: JSONL, JSON, CSV or Parquet file, or Hub id of a dataset. "embedded": '
        "those of the embedded target. null: those of data.sources.",
    )
    sources: dict[str, SourceConfig] = setting(
        {}, "Several sources of training conversations, by name, in place of data.train."
    )
    eval: str | None = setting(
        None, "Source of the held-out prompts, as data.train. null: held out of data.train."
    )
    subset: str | None = setting(None, "Subset of a Hub dataset that has several, such as main of gsm8k.")
    split: str = setting("train", "Split of a Hub dataset in data.train.")
    eval_split: str = setting("test", "Split of a Hub dataset in data.eval.")
    prompt_column: str | None = setting(None, "Column of the user's text. null: found by name.")
    input_column: str | None = setting(
        None, "Column of a text that follows the user's. null: Alpaca's input, or none."
    )
    response_column: str | None = setting(None, "Column of the assistant's text. null: found by name.")
    near_duplicates: float | None = setting(
        None,
        "Similarity from which a conversation is a near-duplicate of an earlier one and left out: the "
        "fraction of the sequences of five words of either that both have. null: none is left out.",
        gt=0,
        le=1,
    )
    drop_evaluation_prompts: bool = setting(
        False,
        "Whether conversations with a prompt of an evaluation set are left out: of data.eval and of "
        "data.evaluation_sets. Otherwise only those with a prompt of data.eval are.",
    )
    evaluation_sets: dict[str, EvaluationSetConfig] = setting(
        {}, "Further evaluation sets, by name, for data.drop_evaluation_prompts."
    )
    turns: Turns = setting(Turns.all, "Which assistant turns are trained on.")
    template_kwargs: dict[str, Any] = setting(
        {}, "Arguments of the chat template, such as {enable_thinking: false}. Serving must use the same."
    )
    max_tokens: int = setting(2048, "Length limit of a sample, in tokens.", ge=1)
    overlong: Overlong = setting(Overlong.cut, "What happens to longer samples.")
    max_malformed_fraction: float = setting(
        0.01, "Fraction of rows that may be malformed before the run stops.", ge=0, le=1
    )
    num_workers: int | None = setting(
        None, "Processes that tokenize. null: the cores of this node.", ge=1, le=4096
    )
    num_validation: int = setting(32, "Held-out prompts from which the best checkpoint is chosen.", ge=1)
    num_test: int = setting(32, "Held-out prompts for the final evaluation.", ge=1)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)


def check_data(data: DataConfig) -> None:
    """Raise UserError for values that no stage could use."""
    check_sampling(data.regenerate)
    check_template_kwargs(data.template_kwargs, "data.template_kwargs.")
    check_sources(data)
    check_augment(data)


def check_sampling(regenerate: RegenerateConfig) -> None:
    """Raise UserError for settings of sampling that have no meaning, or none for greedy completions."""
    if regenerate.temperature:
        return
    default = RegenerateConfig()
    for name in ("top_p", "top_k", "completions"):
        if getattr(regenerate, name) != getattr(default, name):
            remedy = "Greedy completions are always the same; set data.regenerate.temperature above 0."
            raise UserError(f"data.regenerate.{name}", getattr(regenerate, name), remedy)


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
    if data.evaluation_sets and not data.drop_evaluation_prompts:
        remedy = "They have no use without data.drop_evaluation_prompts=true; set it, or leave them out."
        raise UserError("data.evaluation_sets", ", ".join(data.evaluation_sets), remedy)


def check_augment(data: DataConfig) -> None:
    """Raise UserError for changes of training prompts that cannot be made."""
    augment = data.augment
    if augment.template_probability > 0 and not augment.templates:
        raise UserError("data.augment.templates", augment.templates, "Give at least one.")
    for template in augment.templates:
        check_template(template, "data.augment.templates")
