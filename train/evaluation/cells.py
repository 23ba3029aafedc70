"""The cells of the robustness matrix: their names, their prompts, and their captured completions."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from data.progress import tracked
from data.store import HiddenStateStore
from data.text.perturbation import UNCHANGED, PromptSetting
from data.text.schemas import Conversation
from data.text.split import prompt_hashes
from eagle31.errors import UserError
from eagle31.json_files import expecting, file_within, read_json
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from train.evaluation.replay import MAX_DRAFT_TOKENS, PromptAcceptance, packed, replay_greedily

CELLS = "cells"  # the link in an output directory to the newest run's cells
LISTING = "cells.json"
EVALUATION, VALIDATION = "evaluation", "validation"
UNPERTURBED = PromptSetting()
_MIN_FILLED = 0.9  # of the tokens to which a setting lengthens a prompt

# Returns the token ids of a conversation's prompt under a setting, or raises a UserError.
Render = Callable[[Conversation, PromptSetting], list[int]]


@dataclass(frozen=True)
class Cell:
    """One domain under one setting."""

    domain: str
    setting: PromptSetting = UNPERTURBED

    @property
    def is_base(self) -> bool:
        return self.setting == UNPERTURBED

    @property
    def condition(self) -> str:
        """What differs from the base cell, such as `renamed_roles` or `system_short+context_2048`."""
        return condition_of(self.setting)

    @property
    def name(self) -> str:
        return self.domain if self.is_base else f"{self.domain}/{self.condition}"


@dataclass(frozen=True)
class RenderedCell:
    """The prompts of a cell."""

    cell: Cell
    purpose: str  # EVALUATION or VALIDATION
    prompt_ids: list[str]
    prompts: list[list[int]]


@dataclass(frozen=True)
class LeftOut:
    """A cell that is not measured, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class FinishedCell:
    """A cell whose completions are captured."""

    cell: Cell
    purpose: str
    directory: Path  # the store of the completions' hidden states
    prompt_ids: tuple[str, ...]  # in the order of the store
    mean_prompt_tokens: float

    @property
    def name(self) -> str:
        return self.cell.name

    @property
    def key(self) -> str:
        """The name of the cell's artifact, which is the same for the same prompts of the same target."""
        return self.directory.parent.name

    def open(self) -> HiddenStateStore:
        return HiddenStateStore(self.directory)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "domain": self.cell.domain,
            "setting": asdict(self.cell.setting),
            "purpose": self.purpose,
            "artifact": self.key,
            "mean_prompt_tokens": self.mean_prompt_tokens,
            "prompt_ids": list(self.prompt_ids),
        }

    @staticmethod
    def from_json(fields: dict[str, Any], artifacts: Path) -> "FinishedCell":
        return FinishedCell(
            Cell(fields["domain"], PromptSetting(**fields["setting"])),
            fields["purpose"],
            file_within(artifacts, fields["artifact"], Path(LISTING)) / "states",
            tuple(fields["prompt_ids"]),
            fields["mean_prompt_tokens"],
        )


def condition_of(setting: PromptSetting) -> str:
    """Return the name of a setting, which is empty for that of training."""
    parts = []
    if setting.template != UNCHANGED:
        parts.append(Path(setting.template).stem)
    if setting.system != UNCHANGED:
        parts.append(f"system_{setting.system}")
    if setting.context_tokens is not None:
        parts.append(f"context_{setting.context_tokens}")
    return "+".join(parts)


def settings_of(
    templates: Sequence[str], systems: Sequence[str], context_tokens: Sequence[int], *, crossed: bool
) -> list[PromptSetting]:
    """Return the settings of each domain, that of training first.

    Args:
        crossed: whether all combinations are returned; otherwise a setting changes one thing.

    Raises:
        UserError: two templates have the same name.
    """
    others = [
        [PromptSetting(template=one) for one in templates],
        [PromptSetting(system=one) for one in systems],
        [PromptSetting(context_tokens=one) for one in context_tokens],
    ]
    if crossed:
        combined = product((UNCHANGED, *templates), (UNCHANGED, *systems), (None, *context_tokens))
        found = [PromptSetting(*one) for one in combined]
    else:
        found = [UNPERTURBED, *(setting for factor in others for setting in factor)]
    settings = list(dict.fromkeys(found))
    names = [condition_of(setting) for setting in settings]
    for name in names:
        if names.count(name) > 1:
            remedy = "Two settings have this name; rename the file of the template."
            raise UserError("evaluate.matrix.templates", name, remedy)
    return settings


def rendered_cell(
    cell: Cell,
    purpose: str,
    conversations: Sequence[Conversation],
    render: Render,
    max_prompt_tokens: int,
) -> RenderedCell | LeftOut:
    """Render the prompts of a cell; those that have no room or are refused are left out and reported."""
    prompt_ids, prompts, reasons = [], [], []
    for conversation in conversations:
        try:
            ids = render(conversation, cell.setting)
        except UserError as refused:
            reasons.append(refused.remedy)
            continue
        if len(ids) > max_prompt_tokens:
            reasons.append(
                f"{len(ids)} tokens, and at most {max_prompt_tokens} leave room for the completion"
            )
            continue
        if len(ids) < _MIN_FILLED * (cell.setting.context_tokens or 0):
            reasons.append(f"the texts of its domain lengthen a prompt to {len(ids)} tokens only")
            continue
        prompt_ids.append(f"{int(prompt_hashes([conversation])[0]):016x}")
        prompts.append(ids)
    if not prompts:
        reason = reasons[0] if reasons else "its domain has no prompts left that training has not seen"
        return LeftOut(cell.name, reason)
    if reasons:
        print(f"cells: {cell.name}: {len(reasons)} prompts are left out, the first: {reasons[0]}", flush=True)
    return RenderedCell(cell, purpose, prompt_ids, prompts)


def read_listing(directory: Path) -> tuple[list[FinishedCell], list[LeftOut]]:
    """Return the cells of a finished cells stage, and those that it left out."""
    # A run that continues an earlier training links the directory to the earlier run's.
    artifacts, path = directory.resolve().parent, directory / LISTING
    with expecting(path, "the listing of a cells stage"):
        content = read_json(path)
        cells = [FinishedCell.from_json(fields, artifacts) for fields in content["cells"]]
        return cells, [LeftOut(**fields) for fields in content["left_out"]]


def finished_cells(output_dir: Path, purpose: str = EVALUATION) -> list[FinishedCell]:
    """Return the cells of the run with this output directory; none if it has no matrix."""
    directory = Path(output_dir) / CELLS
    if not directory.exists():
        return []
    return [one for one in read_listing(directory)[0] if one.purpose == purpose]


def replay_cells(
    cells: Sequence[FinishedCell],
    drafter: Drafter,
    frozen: FrozenParts,
    max_draft_tokens: int = MAX_DRAFT_TOKENS,
) -> Iterator[tuple[FinishedCell, PromptAcceptance]]:
    """Yield the acceptance in each cell, for which no target is needed.

    The prompts of the acceptance are in the order of the cell's `prompt_ids`.
    """
    for cell in cells:
        yield cell, replay_cell(cell, drafter, frozen, max_draft_tokens)


def replay_cell(
    cell: FinishedCell, drafter: Drafter, frozen: FrozenParts, max_draft_tokens: int
) -> PromptAcceptance:
    """Return the acceptance in a cell, whose prompts are in the order of its `prompt_ids`."""
    store = cell.open()
    samples = (store[index] for index in tracked(range(len(store)), f"replay, {cell.name}", "prompts"))
    return replay_greedily(drafter, frozen, packed(samples), max_draft_tokens)


def listing(cells: Sequence[FinishedCell], left_out: Sequence[LeftOut]) -> dict[str, Any]:
    """Return the content of a cells stage's listing."""
    content = {"cells": [one.to_json() for one in cells], "left_out": [asdict(one) for one in left_out]}
    return json.loads(json.dumps(content))
