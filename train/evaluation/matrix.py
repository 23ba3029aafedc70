"""The robustness matrix: acceptance under other chat templates, system prompts and lengths."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerBase

from data.conversations.held_out import choose_prompts, first_prompt, prompt_rank
from data.conversations.perturbation import SYSTEM_PROMPTS, TEMPLATES, UNCHANGED, PromptSetting, check_setting
from data.conversations.prompts import prompt_ids, prompt_messages
from data.conversations.reading import Source
from data.conversations.schemas import Conversation
from data.samples import CapturedSample
from data.sampling import Sampling
from eagle31.errors import UserError
from train.evaluation.completing import CompletingTarget
from train.evaluation.intervals import Interval, length_of, paired_ratio
from train.evaluation.replay import PromptAcceptance
from train.tables import aligned

_MIN_FILLED = 0.9  # of the tokens to which a setting lengthens a prompt


@dataclass(frozen=True)
class Cell:
    """The prompts of one domain under one setting, and from `complete_cells` on the target's completions."""

    domain: str
    setting: PromptSetting
    prompt_ids: tuple[str, ...]  # the same for the same question under another setting
    prompts: tuple[Sequence[int], ...]
    completions: tuple[Sequence[int], ...] = ()

    @property
    def condition(self) -> str:
        """What differs from the base cell, such as `plain`; empty for that cell."""
        return condition_of(self.setting)

    @property
    def name(self) -> str:
        return f"{self.domain}/{self.condition}" if self.condition else self.domain

    @property
    def mean_prompt_tokens(self) -> float:
        return sum(map(len, self.prompts)) / len(self.prompts)

    def samples(self, completing: CompletingTarget) -> Iterator[CapturedSample]:
        return (sample for _, sample in completing.samples(self.prompts, self.completions))


def prompt_source(field: str, split: str = "test", **columns: Any) -> Source:
    """Return a source of prompts, whose location is still open; `field` is the setting's name in messages."""
    return Source("", field, split, require_answer=False, **columns)


def parse_sources(given: Sequence[str], columns: Source) -> dict[str, Source]:
    """Return the sources by domain.

    Args:
        given: each is NAME=SOURCE, or SOURCE, whose name is the file's, or a .yaml file of sources by name.
        columns: what the options name for each source that is not in a file.

    Raises:
        UserError: two have the same name, or a file cannot be read.
    """
    found: dict[str, Source] = {}
    for one in given:
        if one.endswith(".yaml"):
            new = _listed_sources(Path(one), columns.field)
        else:
            named = re.fullmatch(r"([\w-]+)=(.+)", one)
            name, source = (named[1], named[2]) if named else (re.sub(r"[^\w-]+", "_", Path(one).stem), one)
            new = {name: replace(columns, location=source)}
        for name in new.keys() & found.keys():
            raise UserError(columns.field, one, f"There are two domains called {name}; give NAME=FILE.")
        found |= new
    return found


def _listed_sources(path: Path, field: str) -> dict[str, Source]:
    try:
        listed: Any = OmegaConf.to_object(OmegaConf.load(path))
        return {
            name: replace(prompt_source(field), location=fields.pop("source"), **fields)
            for name, fields in listed.items()
        }
    except FileNotFoundError:
        raise UserError(field, path, "There is no such file.") from None
    except Exception as error:  # of the YAML parser, or of another shape
        remedy = f"It is no list of sources by name, such as recipes/benchmarks.yaml: {error}"
        raise UserError(field, path, remedy) from None


def settings_of(
    templates: Sequence[str] | None, systems: Sequence[str] | None, context_tokens: Sequence[int]
) -> list[PromptSetting]:
    """Return the settings of each domain: that of training, and one for each change of it.

    Args:
        templates, systems: names; None for all.

    Raises:
        UserError: a name is unknown, or two templates have the same name.
    """
    changes = [
        *(PromptSetting(template=one) for one in (TEMPLATES if templates is None else templates)),
        *(PromptSetting(system=one) for one in (SYSTEM_PROMPTS if systems is None else systems)),
        *(PromptSetting(context_tokens=one) for one in context_tokens),
    ]
    settings = list(dict.fromkeys([PromptSetting(), *changes]))
    for setting in settings:
        check_setting(setting, "--matrix")
    names = [condition_of(setting) for setting in settings]
    for name in names:
        if names.count(name) > 1:
            raise UserError("--templates", name, "Two settings have this name; rename the template's file.")
    return settings


def condition_of(setting: PromptSetting) -> str:
    """Return the name of a setting, which is empty for that of training."""
    if setting.template != UNCHANGED:
        return Path(setting.template).stem
    if setting.system != UNCHANGED:
        return f"system_{setting.system}"
    return "" if setting.context_tokens is None else f"context_{setting.context_tokens}"


def render_cells(
    domains: Mapping[str, Sequence[Conversation]],
    settings: Sequence[PromptSetting],
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any],
    *,
    num_prompts: int,
    max_prompt_tokens: int,
    seed: int,
) -> tuple[list[Cell], dict[str, str]]:
    """Render the prompts of each cell; return the cells, and why others are left out, by name."""
    cells: list[Cell] = []
    left_out: dict[str, str] = {}
    for domain, conversations in domains.items():
        documents = [_text_of(one) for one in conversations]
        chosen = choose_prompts(conversations, num_prompts, seed)
        ids = [prompt_rank(first_prompt(one), seed).hex() for one in chosen]
        for setting in settings:
            rendered: dict[str, list[int]] = {}
            reason = "The domain has no prompts."
            for name, conversation in zip(ids, chosen, strict=True):
                messages = prompt_messages(conversation)
                try:
                    tokens = prompt_ids(
                        tokenizer, messages, conversation.tools, template_kwargs, setting, documents
                    )
                except UserError as refused:
                    reason = refused.remedy
                    continue
                if len(tokens) > max_prompt_tokens:
                    reason = f"{len(tokens)} tokens leave no room for the completion; {max_prompt_tokens} do."
                elif len(tokens) < _MIN_FILLED * (setting.context_tokens or 0):
                    reason = f"The texts of its domain lengthen a prompt to {len(tokens)} tokens only."
                else:
                    rendered[name] = tokens
            cell = Cell(domain, setting, tuple(rendered), tuple(rendered.values()))
            if rendered:
                cells.append(cell)
            else:
                left_out[cell.name] = reason
    return cells, left_out


def complete_cells(
    cells: Sequence[Cell], completing: CompletingTarget, sampling: Sampling, output: Path, draft_tokens: int
) -> list[Cell]:
    """Return the cells with the target's completions, without those where all are too short for a draft.

    Args:
        output: the file of finished completions, which are not written again.
    """
    prompts = [prompt for cell in cells for prompt in cell.prompts]
    completions = iter(completing.complete(prompts, sampling, output))
    found = []
    for cell in cells:
        # Where a completion ends at its first token there is no draft.
        kept = [
            (name, prompt, completion)
            for name, prompt in zip(cell.prompt_ids, cell.prompts, strict=True)
            if len(completion := next(completions)) > 1
        ]
        if any(len(completion) > draft_tokens for _, _, completion in kept):
            names, of_cell, written = zip(*kept, strict=True)
            found.append(replace(cell, prompt_ids=names, prompts=of_cell, completions=written))
    return found


def _text_of(conversation: Conversation) -> str:
    return "\n\n".join(message["content"] for message in conversation.messages if message["content"])


def matrix_result(
    measured: Sequence[tuple[Cell, PromptAcceptance]], draft_tokens: int
) -> list[dict[str, Any]]:
    """Return each cell's acceptance and its ratio to the domain's base cell at a draft length.

    The ratio is over the prompts that both have, with an interval that does not include how much prompts
    differ; None for a base cell and where they share none.
    """
    bases = {cell.domain: (cell, found) for cell, found in measured if not cell.condition}
    return [
        {
            "name": cell.name,
            "domain": cell.domain,
            "condition": cell.condition,
            "setting": asdict(cell.setting),
            "num_prompts": len(cell.prompts),
            "mean_prompt_tokens": cell.mean_prompt_tokens,
            "by_draft_length": found.to_json()["by_draft_length"],
            "ratio": _ratio((cell, found), bases[cell.domain], draft_tokens)
            if cell.condition and cell.domain in bases
            else None,
        }
        for cell, found in measured
    ]


def _ratio(
    changed: tuple[Cell, PromptAcceptance], base: tuple[Cell, PromptAcceptance], draft_tokens: int
) -> dict[str, Any] | None:
    common = [one for one in changed[0].prompt_ids if one in base[0].prompt_ids]
    if not common:
        return None

    def counts_of(cell: Cell, acceptance: PromptAcceptance) -> dict[str, Any]:
        places = [cell.prompt_ids.index(one) for one in common]
        counts = {name: rows[draft_tokens - 1] for name, rows in acceptance.counts().items()}
        return {"by_prompt": {name: [[row[place] for place in places]] for name, row in counts.items()}}

    found = paired_ratio(counts_of(*changed), counts_of(*base), 0)
    if math.isnan(found.value):  # no draft is within these completions
        return None
    return asdict(found) | {"num_prompts": len(common)}


def format_matrix(result: Mapping[str, Any]) -> str:
    """Return the table for the terminal, with a row for each cell."""
    k = result["k"]
    rows = [["cell", "prompts", "prompt tokens", f"acceptance length, k = {k}", "of its base cell"]]
    for cell in result["cells"]:
        stats, ratio = cell["by_draft_length"][k - 1], cell["ratio"]
        of_base = "" if ratio is None else Interval(ratio["value"], ratio["low"], ratio["high"]).shown()
        counts = [str(cell["num_prompts"]), f"{cell['mean_prompt_tokens']:.0f}"]
        rows.append([cell["name"], *counts, length_of(stats).shown(), of_base])
    has_ratios = any(cell["ratio"] for cell in result["cells"])
    return "\n".join(aligned(rows if has_ratios else [row[:-1] for row in rows]))
