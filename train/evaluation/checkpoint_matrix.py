"""The robustness matrix of any drafter checkpoint, for `scripts/evaluate --matrix`."""

import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from data.rendering.inspection import parse_template_kwargs
from data.rendering.prompts import prompt_ids
from data.sampling import Sampling
from data.target.aux_layers import check_aux_layer_ids
from data.target.checkpoint import Checkpoint
from data.target.parts import TargetParts, load_target_parts
from data.target.tokenizer import load_tokenizer
from data.text.perturbation import SYSTEM_PROMPTS, TEMPLATES, UNCHANGED, PromptSetting, check_setting
from data.text.schemas import Conversation
from data.text.split import prompt_hashes
from eagle31.errors import UserError
from eagle31.export.read import LoadedExport
from eagle31.json_files import write_json
from train.artifact import fingerprint
from train.drafter.published import fetch_checkpoint, open_published
from train.evaluation.cells import EVALUATION, Cell, LeftOut, RenderedCell, rendered_cell, settings_of
from train.evaluation.checkpoint import CheckpointEvaluation, OpenedCheckpoint, check, open_target
from train.evaluation.domains import DomainSource, chosen_domain, prompt_messages, read_domains
from train.evaluation.matrix import cell_names, cell_result, matrix_result
from train.evaluation.passes import PassResults
from train.evaluation.replay import longest_draft, packed, replay_greedily

_NOTHING_SEEN: Sequence[Conversation] = ()  # the training data of a published checkpoint is not known


@dataclass(frozen=True)
class CheckpointMatrix:
    """The settings of `scripts/evaluate --matrix`."""

    evaluation: CheckpointEvaluation  # the checkpoint, its target, and how completions are written
    domains: Mapping[str, str]  # the files or Hub ids by the domains' names
    templates: Sequence[str] = tuple(one for one in TEMPLATES if one != UNCHANGED)
    systems: Sequence[str] = tuple(SYSTEM_PROMPTS)
    context_tokens: Sequence[int] = ()
    crossed: bool = False
    category_column: str | None = None
    output: Path | None = None  # a directory of finished cells, which are not measured again


def parse_domains(given: Sequence[str]) -> dict[str, str]:
    """Return the sources by name, each given as NAME=SOURCE, or as SOURCE, whose name is the file's.

    Raises:
        UserError: two have the same name.
    """
    found: dict[str, str] = {}
    for one in given:
        named = re.fullmatch(r"([\w-]+)=(.+)", one)
        name, source = (named[1], named[2]) if named else (re.sub(r"[^\w-]+", "_", Path(one).stem), one)
        if name in found:
            raise UserError("--data", one, f"There are two domains called {name}; give NAME=FILE.")
        found[name] = source
    return found


def evaluate_matrix(settings: CheckpointMatrix) -> dict[str, Any]:
    """Measure a checkpoint in every cell; return `matrix` of evaluation.json and what was measured.

    Raises:
        UserError: the input is invalid, or no cell is left; raised before the target is loaded.
    """
    evaluation = settings.evaluation
    check(evaluation)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    conditions = checked_settings(settings)
    sources = [domain for name in settings.domains for domain in _read(settings, name)]
    parts = load_target_parts(evaluation.spec)
    ids = evaluation.aux_layer_ids and check_aux_layer_ids(evaluation.aux_layer_ids, parts.num_layers)
    directory = fetch_checkpoint(evaluation.checkpoint, evaluation.revision, "checkpoint")
    loaded = open_published(directory, parts, ids, "checkpoint")
    tokenizer = load_tokenizer(evaluation.spec, evaluation.chat_template)
    limit = max_prompt(parts, loaded, evaluation)
    cells, left_out = render_cells(evaluation, conditions, sources, tokenizer, limit)
    if not cells:
        reasons = "; ".join(f"{one.name}: {one.reason}" for one in left_out)
        raise UserError("--data", ", ".join(settings.domains), f"No cell can be measured: {reasons}")
    eos = tuple(sorted(set(parts.eos_token_ids) | {tokenizer.eos_token_id} - {None}))
    greedy = Sampling(evaluation.max_new_tokens, eos, 0.0, evaluation.seed)
    longest = longest_draft(evaluation.draft_tokens)
    inputs = {
        "target": parts.fingerprint,
        "checkpoint": Checkpoint(str(directory.resolve())).fingerprint(None),
        "aux_layer_ids": list(loaded.drafter.config.aux_layer_ids),
        "sampling": greedy.to_json(),
        "dtype": evaluation.dtype,
        "draft_tokens": longest,
    }
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    opened: list[OpenedCheckpoint] = []

    def target() -> OpenedCheckpoint:
        if not opened:  # where all cells are finished it is not loaded
            opened.append(open_target(evaluation, parts, loaded, device))
        return opened[0]

    with _kept(settings.output) as kept:
        passes, found = PassResults(Path(kept)), []
        for cell in cells:
            key = f"cell-{fingerprint(inputs | {'prompts': [cell.prompt_ids, cell.prompts]})}"

            def measure(cell: RenderedCell = cell, key: str = key) -> dict[str, Any]:
                return measured_cell(target(), cell, greedy, longest, Path(kept) / f"{key}.jsonl")

            result = passes.run(key, measure)
            if result["prompt_ids"]:
                found.append(result | cell_names(cell.cell))
            else:
                left_out.append(LeftOut(cell.cell.name, "The target completes none of its prompts."))
    if not found:
        raise UserError("--data", ", ".join(settings.domains), "The target completes none of its prompts.")
    result = {
        "checkpoint": evaluation.checkpoint,
        "target": evaluation.target,
        "matrix": matrix_result(found, left_out, evaluation.draft_tokens),
    }
    if evaluation.json is not None:
        write_json(evaluation.json, result)
    return result


def checked_settings(settings: CheckpointMatrix) -> list[PromptSetting]:
    """Return the settings of each domain, after checking their names."""
    for setting in [
        *(PromptSetting(template=one) for one in settings.templates),
        *(PromptSetting(system=one) for one in settings.systems),
        *(PromptSetting(context_tokens=one) for one in settings.context_tokens),
    ]:
        check_setting(setting, "--matrix")
    return settings_of(
        settings.templates, settings.systems, settings.context_tokens, crossed=settings.crossed
    )


def max_prompt(parts: TargetParts, loaded: LoadedExport, evaluation: CheckpointEvaluation) -> int:
    """Return the longest prompt that leaves room for its completion in the target and in the drafter."""
    drafter = loaded.drafter.config.max_position_embeddings
    positions = getattr(parts.config.get_text_config(), "max_position_embeddings", None)
    return min(positions or drafter, drafter) - evaluation.max_new_tokens


def render_cells(
    evaluation: CheckpointEvaluation,
    settings: Sequence[PromptSetting],
    sources: Sequence[DomainSource],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
) -> tuple[list[RenderedCell], list[LeftOut]]:
    """Render the prompts of each cell."""
    rendered: list[RenderedCell] = []
    left_out: list[LeftOut] = []
    template_kwargs = parse_template_kwargs(evaluation.template_kwargs)
    for source in sources:
        domain = chosen_domain(source, prompt_hashes(_NOTHING_SEEN), evaluation.seed)

        def render(
            conversation: Conversation, setting: PromptSetting, source: DomainSource = source
        ) -> list[int]:
            messages = prompt_messages(conversation)
            tools, documents = conversation.tools, source.documents
            return prompt_ids(tokenizer, messages, tools, template_kwargs, setting, documents)

        for setting in settings:
            cell = Cell(source.name, setting)
            one = rendered_cell(cell, EVALUATION, domain.evaluation, render, max_prompt_tokens)
            if isinstance(one, RenderedCell):
                rendered.append(one)
            else:
                left_out.append(one)
    return rendered, left_out


def measured_cell(
    opened: OpenedCheckpoint,
    cell: RenderedCell,
    greedy: Sampling,
    max_draft_tokens: int,
    output: Path,
) -> dict[str, Any]:
    """Have the target complete the prompts of a cell, and replay the completions."""
    completions = opened.completing.complete(cell.prompts, greedy, output)
    # Where a completion ends at its first token there is no draft.
    kept = [index for index, completion in enumerate(completions) if len(completion) > 1]
    prompts = [cell.prompts[index] for index in kept]
    if not kept:
        return {"prompt_ids": []}
    samples = opened.completing.samples(prompts, [completions[index] for index in kept])
    acceptance = replay_greedily(opened.drafter, opened.frozen, packed(samples), max_draft_tokens)
    ids = [cell.prompt_ids[index] for index in kept]
    return cell_result(cell.cell, ids, sum(map(len, prompts)) / len(prompts), acceptance)


def _read(settings: CheckpointMatrix, name: str) -> list[DomainSource]:
    evaluation = settings.evaluation
    return read_domains(
        name,
        settings.domains[name],
        split=evaluation.split,
        subset=evaluation.subset,
        prompt_column=evaluation.prompt_column,
        response_column=evaluation.response_column,
        category_column=settings.category_column,
        num_prompts=evaluation.num_prompts,
        field="--data",
    )


def _kept(output: Path | None) -> AbstractContextManager[Path | str]:
    if output is None:
        return tempfile.TemporaryDirectory(prefix="eagle31-matrix-")
    return nullcontext(output)
