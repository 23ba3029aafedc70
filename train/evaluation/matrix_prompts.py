"""The prompts of a recipe's robustness matrix: those of its domains, and how its cells render them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.text.perturbation import PromptSetting
from data.text.schemas import Conversation
from eagle31.errors import UserError
from train.config.evaluate import MatrixConfig
from train.evaluation.cells import (
    EVALUATION,
    VALIDATION,
    Cell,
    LeftOut,
    RenderedCell,
    rendered_cell,
    settings_of,
)
from train.evaluation.domains import Domain, DomainSource, chosen_domain, document_of, read_domains

# Returns the token ids of a conversation's prompt under a setting, with the documents of its domain.
RenderWithDocuments = Callable[[Conversation, PromptSetting, Sequence[str]], list[int]]


def matrix_settings(matrix: MatrixConfig) -> list[PromptSetting]:
    """Return the settings of each domain."""
    return settings_of(matrix.templates, matrix.systems, matrix.context_tokens, crossed=matrix.crossed)


def domain_sources(matrix: MatrixConfig) -> dict[str, list[DomainSource]]:
    """Read the sources of the domains that have one, by the recipe's name of the domain."""
    return {
        name: read_domains(
            name,
            domain.source,
            split=domain.split,
            subset=domain.subset,
            prompt_column=domain.prompt_column,
            category_column=domain.category_column,
            num_prompts=domain.num_prompts,
            field=f"evaluate.matrix.domains.{name}.source",
        )
        for name, domain in matrix.domains.items()
        if domain.source is not None
    }


def check_names(matrix: MatrixConfig, sources: dict[str, list[DomainSource]]) -> None:
    """Raise UserError for a validation cell that the matrix does not have."""
    domains = [
        one
        for name in matrix.domains
        for one in ([d.name for d in sources[name]] if name in sources else [name])
    ]
    known = [Cell(domain, setting).name for domain in domains for setting in matrix_settings(matrix)]
    for name in matrix.validation_cells:
        if name not in known:
            remedy = f"There is no such cell. The cells are {', '.join(known)}."
            raise UserError("evaluate.matrix.validation_cells", name, remedy)


def matrix_domains(
    matrix: MatrixConfig, held_out: dict[str, list[dict[str, Any]]], seen: NDArray[np.uint64], seed: int
) -> list[Domain]:
    """Return the domains with their prompts, without those that training has seen.

    Args:
        held_out: the run's held-out prompts, for the domains that have no source.
        seen: hashes of the prompts that training sees.
    """
    sources = domain_sources(matrix)
    found: list[Domain] = []
    for name, settings in matrix.domains.items():
        if name in sources:
            found += [chosen_domain(source, seen, seed) for source in sources[name]]
        else:
            found.append(held_out_domain(name, held_out, settings.num_prompts))
    for domain in found:
        if domain.num_left_out:
            print(
                f"cells: {domain.name}: {domain.num_left_out} prompts are left out, because they are in the "
                "training data",
                flush=True,
            )
    return found


def held_out_domain(name: str, held_out: dict[str, list[dict[str, Any]]], num_prompts: int) -> Domain:
    """Return the run's held-out prompts: those for the evaluation, and those for validation."""
    conversations = {
        part: [
            Conversation(one["id"], tuple(one["messages"]), one["tools"] and tuple(one["tools"]))
            for one in prompts
        ]
        for part, prompts in held_out.items()
    }
    documents = [document_of(one) for part in conversations.values() for one in part]
    test, validation = (conversations[part][:num_prompts] for part in ("test", "validation"))
    return Domain(name, test, validation, documents)


def render_cells(
    matrix: MatrixConfig, domains: Sequence[Domain], render: RenderWithDocuments, limits: Mapping[str, int]
) -> tuple[list[RenderedCell], list[LeftOut]]:
    """Render the prompts of all cells, for evaluation and of some for validation.

    Args:
        limits: the tokens of the longest prompt by purpose.

    Raises:
        UserError: a validation cell has no prompts.
    """
    rendered: list[RenderedCell] = []
    left_out: list[LeftOut] = []
    for domain in domains:

        def render_one(one: Conversation, setting: PromptSetting, domain: Domain = domain) -> list[int]:
            return render(one, setting, domain.documents)

        for setting in matrix_settings(matrix):
            cell = Cell(domain.name, setting)
            purposes = [(EVALUATION, domain.evaluation)]
            if cell.name in matrix.validation_cells:
                purposes.append((VALIDATION, domain.validation))
            for purpose, conversations in purposes:
                one = rendered_cell(cell, purpose, conversations, render_one, limits[purpose])
                if isinstance(one, RenderedCell):
                    rendered.append(one)
                elif purpose == VALIDATION:
                    raise no_validation(cell, one.reason)
                else:
                    left_out.append(one)
    return rendered, left_out


def no_validation(cell: Cell, reason: str) -> UserError:
    remedy = (
        f"It has no prompts for validation: {reason}. Validation needs other prompts than the evaluation; "
        "lower num_prompts of its domain, or choose another cell."
    )
    return UserError("evaluate.matrix.validation_cells", cell.name, remedy)
