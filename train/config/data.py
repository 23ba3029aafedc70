"""The recipe's schema for the training data."""

import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from data.text.choices import Overlong, Turns, check_template_kwargs
from data.text.perturbation import check_system, check_template
from eagle31.errors import UserError, require_positive
from train.config.limits import check_temperature


@dataclass
class RegenerateConfig:
    """Replacement of the assistant's turns by completions that the target writes itself."""

    enabled: bool = False  # Whether the assistant's turns are replaced.
    max_new_tokens: int = 512  # Length limit of a turn, in tokens.
    temperature: float = 0.0  # Sampling temperature; 0 is greedy.
    # A token is sampled from the most likely tokens that together have this probability. 1: from all.
    top_p: float = 1.0
    top_k: int = 0  # A token is sampled from this many of the most likely tokens. 0: from all.
    # Completions of each conversation, each of which the target writes independently of the others.
    completions: int = 1
    batch_size: int = 16  # Prompts of one forward pass with target.engine=hf; vLLM batches by itself.
    # Processes that run the target with target.engine=hf. null: one for each GPU of the node, and 1 on a CPU.
    processes: int | None = None


@dataclass
class AugmentConfig:
    """Training prompts under other conditions, each conversation by chance.

    Held-out prompts stay as they are. `scripts/evaluate --matrix` measures under these conditions, and
    docs/study.md has an ablation of each.
    """

    template_probability: float = 0.0  # Fraction of the conversations that another chat template renders.
    # The templates: renamed_roles, extra_whitespace, chatml, plain, or paths of templates.
    templates: list[str] = field(default_factory=lambda: ["renamed_roles", "extra_whitespace", "plain"])
    system_probability: float = 0.0  # Fraction of the conversations whose system prompt is replaced.
    # The system prompts: none, short, long, other_language.
    systems: list[str] = field(default_factory=lambda: ["none", "short", "long", "other_language"])
    # Fraction of the conversations with texts of other conversations before the first question.
    documents_probability: float = 0.0
    documents_tokens: int = 512  # The most tokens of such texts; fewer are as likely.


@dataclass
class SourceConfig:
    """One of several sources of training conversations, under a name that is chosen freely."""

    source: str = MISSING  # Training conversations, as data.train.
    split: str = "train"  # Split of a Hub dataset.
    subset: str | None = None  # Subset of a Hub dataset that has several.
    prompt_column: str | None = None  # Column of the user's text. null: found by name.
    input_column: str | None = (
        None  # Column of a text that follows the user's. null: Alpaca's input, or none.
    )
    response_column: str | None = None  # Column of the assistant's text. null: found by name.
    # Share of the training conversations, relative to the weights of the other sources. Either all sources
    # have one or none; null: all conversations are used.
    weight: float | None = None
    max_conversations: int | None = None  # The most conversations that are used, chosen at random.


@dataclass
class EvaluationSetConfig:
    """Prompts that training must not see, under a name that is chosen freely."""

    source: str = MISSING  # JSONL, JSON, CSV or Parquet file, or Hub id of a dataset.
    split: str = "test"  # Split of a Hub dataset.
    subset: str | None = None  # Subset of a Hub dataset that has several.
    prompt_column: str | None = None  # Column of the user's text. null: found by name.


@dataclass
class DataConfig:
    """The conversations that training and evaluation use."""

    # Training conversations: JSONL, JSON, CSV or Parquet file, or Hub id of a dataset. "embedded": those of
    # the embedded target. null: those of data.sources.
    train: str | None = MISSING
    # Several sources of training conversations, by name, in place of data.train.
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    eval: str | None = None  # Source of the held-out prompts, as data.train. null: held out of data.train.
    subset: str | None = None  # Subset of a Hub dataset that has several, such as main of gsm8k.
    split: str = "train"  # Split of a Hub dataset in data.train.
    eval_split: str = "test"  # Split of a Hub dataset in data.eval.
    prompt_column: str | None = None  # Column of the user's text. null: found by name.
    input_column: str | None = (
        None  # Column of a text that follows the user's. null: Alpaca's input, or none.
    )
    response_column: str | None = None  # Column of the assistant's text. null: found by name.
    # Similarity from which a conversation is a near-duplicate of an earlier one and left out: the fraction of
    # the sequences of five words of either that both have. null: none is left out.
    near_duplicates: float | None = None
    # Whether conversations with a prompt of an evaluation set are left out: of data.eval and of
    # data.evaluation_sets. Otherwise only those with a prompt of data.eval are.
    drop_evaluation_prompts: bool = False
    # Further evaluation sets, by name, for data.drop_evaluation_prompts.
    evaluation_sets: dict[str, EvaluationSetConfig] = field(default_factory=dict)
    turns: Turns = Turns.all  # Which assistant turns are trained on.
    # Arguments of the chat template, such as {enable_thinking: false}. Serving must use the same.
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 2048  # Length limit of a sample, in tokens.
    overlong: Overlong = Overlong.cut  # What happens to longer samples.
    max_malformed_fraction: float = 0.01  # Fraction of rows that may be malformed before the run stops.
    num_workers: int | None = None  # Processes that tokenize. null: the cores of this node.
    num_validation: int = 32  # Held-out prompts from which the best checkpoint is chosen.
    num_test: int = 32  # Held-out prompts for the final evaluation.
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)


def check_data(data: DataConfig) -> None:
    """Raise UserError for values that no stage could use."""
    regenerate = data.regenerate
    require_positive(
        {
            "data.max_tokens": data.max_tokens,
            "data.num_validation": data.num_validation,
            "data.num_test": data.num_test,
            "data.regenerate.max_new_tokens": regenerate.max_new_tokens,
            "data.regenerate.batch_size": regenerate.batch_size,
            "data.regenerate.processes": regenerate.processes,
        }
    )
    if not 0 <= data.max_malformed_fraction <= 1:
        raise UserError("data.max_malformed_fraction", data.max_malformed_fraction, "It must be in [0, 1].")
    if not regenerate.temperature >= 0:
        raise UserError("data.regenerate.temperature", regenerate.temperature, "It must not be negative.")
    check_temperature("data.regenerate.temperature", regenerate.temperature)
    check_sampling(regenerate)
    if data.num_workers is not None and data.num_workers < 1:
        raise UserError("data.num_workers", data.num_workers, "Give at least 1, or null for all cores.")
    check_template_kwargs(data.template_kwargs, "data.template_kwargs.")
    check_sources(data)
    check_augment(data)


def check_sampling(regenerate: RegenerateConfig) -> None:
    """Raise UserError for settings of sampling that have no meaning, or none for greedy completions."""
    if not 0 < regenerate.top_p <= 1:
        raise UserError("data.regenerate.top_p", regenerate.top_p, "It must be in (0, 1]; 1 is off.")
    if regenerate.top_k < 0:
        raise UserError("data.regenerate.top_k", regenerate.top_k, "Give at least 1, or 0 for all tokens.")
    require_positive({"data.regenerate.completions": regenerate.completions})
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
        if source.weight is not None and not 0 < source.weight < math.inf:
            remedy = "It must be greater than 0; leave out a source of which nothing is used."
            raise UserError(f"{key}.weight", source.weight, remedy)
        require_positive({f"{key}.max_conversations": source.max_conversations})
    if data.near_duplicates is not None and not 0 < data.near_duplicates <= 1:
        raise UserError("data.near_duplicates", data.near_duplicates, "It must be in (0, 1], such as 0.8.")
    if data.evaluation_sets and not data.drop_evaluation_prompts:
        remedy = "They have no use without data.drop_evaluation_prompts=true; set it, or leave them out."
        raise UserError("data.evaluation_sets", ", ".join(data.evaluation_sets), remedy)


def check_augment(data: DataConfig) -> None:
    """Raise UserError for changes of training prompts that cannot be made."""
    augment = data.augment
    for name, names in (("template", "templates"), ("system", "systems"), ("documents", "documents_tokens")):
        probability = getattr(augment, f"{name}_probability")
        if not 0 <= probability <= 1:
            raise UserError(f"data.augment.{name}_probability", probability, "It must be in [0, 1].")
        if probability > 0 and not getattr(augment, names):
            raise UserError(f"data.augment.{names}", getattr(augment, names), "Give at least one.")
    for template in augment.templates:
        check_template(template, "data.augment.templates")
    for system in augment.systems:
        check_system(system, "data.augment.systems")
    require_positive({"data.augment.documents_tokens": augment.documents_tokens})
    if augment.documents_probability > 0 and augment.documents_tokens >= data.max_tokens:
        remedy = f"No room for an answer would be left in data.max_tokens ({data.max_tokens}); lower it."
        raise UserError("data.augment.documents_tokens", augment.documents_tokens, remedy)
