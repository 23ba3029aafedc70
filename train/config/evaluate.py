"""The recipe's schema for the evaluation of the exported drafter, and for its robustness matrix."""

import re
from dataclasses import dataclass, field

from data.text.perturbation import check_system, check_template
from eagle31.errors import UserError, require_positive
from train.config.limits import check_temperature

# A lengthened prompt can have this many tokens more than the setting names, for where texts are joined.
_CONTEXT_SLACK = 64


@dataclass
class DomainConfig:
    """Prompts of one kind, under a name that is chosen freely."""

    # Prompts: JSONL, JSON, CSV or Parquet file, or Hub id of a dataset. null: the run's held-out prompts.
    source: str | None = None
    split: str = "test"  # Split of a Hub dataset.
    subset: str | None = None  # Subset of a Hub dataset that has several, such as main of openai/gsm8k.
    prompt_column: str | None = None  # Column of the user's text. null: found by name.
    # Column whose values divide the source: each value is a domain, which is called NAME.VALUE. null: all
    # prompts are one domain.
    category_column: str | None = None
    num_prompts: int = 32  # Prompts of each cell.


@dataclass
class MatrixConfig:
    """The robustness matrix: under which conditions the acceptance length is measured.

    A cell is one domain under one setting. Each domain has a base cell, whose setting is that of training.
    """

    # Domains by name. Without any there are no cells.
    domains: dict[str, DomainConfig] = field(default_factory=dict)
    # Chat templates: renamed_roles, extra_whitespace, chatml, plain, or the path of a .jinja file.
    templates: list[str] = field(default_factory=list)
    # System prompts: none, short, long, other_language.
    systems: list[str] = field(default_factory=list)
    # Lengths of the prompt in tokens, up to which other texts of the domain are packed before the question.
    context_tokens: list[int] = field(default_factory=list)
    # Whether each template is combined with each system prompt and each length. Otherwise a cell differs in
    # one of them from its domain's base cell.
    crossed: bool = False
    # Names of cells that are measured at every validation too, on prompts that the evaluation does not use.
    # The best checkpoint is the one with the longest mean acceptance length over the held-out prompts and
    # these cells, each with the same weight.
    validation_cells: list[str] = field(default_factory=list)


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
    matrix: MatrixConfig = field(default_factory=MatrixConfig)


def longest_cell_sample(evaluate: EvaluateConfig) -> int:
    """Return the tokens of the longest lengthened prompt and its completion; 0 without any."""
    longest = max(evaluate.matrix.context_tokens, default=0)
    return longest and longest + _CONTEXT_SLACK + evaluate.max_new_tokens


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
    check_matrix(evaluate.matrix)


def check_matrix(matrix: MatrixConfig) -> None:
    """Raise UserError for names and values that no cell could have; reading a source checks it."""
    for name, domain in matrix.domains.items():
        key = f"evaluate.matrix.domains.{name}"
        if not re.fullmatch(r"[\w-]+", name):
            raise UserError(key, name, "A domain's name has letters, digits, '_' and '-' only.")
        require_positive({f"{key}.num_prompts": domain.num_prompts})
        if domain.source is None and domain.category_column is not None:
            remedy = "The run's held-out prompts have no categories; give a source."
            raise UserError(f"{key}.category_column", domain.category_column, remedy)
    for template in matrix.templates:
        check_template(template, "evaluate.matrix.templates")
    for system in matrix.systems:
        check_system(system, "evaluate.matrix.systems")
    for num_tokens in matrix.context_tokens:
        require_positive({"evaluate.matrix.context_tokens": num_tokens})
    if matrix.validation_cells and not matrix.domains:
        remedy = "There are no cells; give evaluate.matrix.domains, for example with eval=robustness."
        raise UserError("evaluate.matrix.validation_cells", matrix.validation_cells, remedy)
