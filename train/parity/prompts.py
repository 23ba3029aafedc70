"""The prompts to decode, as token ids."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.conversations.prompts import render_prompt
from data.conversations.reading import read_conversations
from data.conversations.saved import load_saved
from eagle31.errors import UserError

Prompts = list[list[int]]
_IDS = "prompt_token_ids"


def find_prompts(
    file: Path | None, export: Path, tokenizer: PreTrainedTokenizerBase, num_prompts: int | None
) -> tuple[Prompts, str]:
    """Return the prompts of `file`, else the held-out prompts of the export's run.

    Returns:
        The first `num_prompts` prompts, and their source.

    Raises:
        UserError: there are none.
    """
    run = run_directory(export)
    held_out = run and newest_answers(run)
    if file is not None:
        prompts, source = read_prompts(file, tokenizer), str(file)
    elif held_out:
        rows = load_saved(held_out)
        prompts, source = [row["input_ids"][: row["num_prompt_tokens"]] for row in rows], str(held_out)
    else:
        remedy = "The export is not in a run's directory; give prompts with --prompts FILE."
        raise UserError("--prompts", None, remedy)
    if not prompts:
        raise UserError("--prompts", source, "It has no prompt; give a JSONL file of conversations.")
    return prompts[:num_prompts], source


def run_directory(export: Path) -> Path | None:
    """Return the OUTPUT_DIR of the run that holds an export, also through the link `OUTPUT_DIR/export`."""
    for path in (export.absolute(), export.resolve()):
        for parent in path.parents:
            if (parent / "artifacts").is_dir() and (parent / "config.yaml").exists():
                return parent
    return None


def newest_answers(run: Path) -> Path | None:
    """Return the directory of the run's newest held-out test prompts."""
    found = [path for path in run.glob("artifacts/answers-*/test") if (path.parent / "stage.json").exists()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def read_prompts(file: Path, tokenizer: PreTrainedTokenizerBase) -> Prompts:
    """Read JSON lines: `{"prompt_token_ids": [...]}`, bare lists of ids, or conversations in any schema.

    A conversation is cut after its last message that is not the assistant's, and ends with the generation
    prompt.

    Raises:
        UserError: the file does not exist or has neither.
    """
    if not file.is_file():
        raise UserError("--prompts", file, "No such file.")
    with file.open(encoding="utf-8") as lines:
        first = next((line for line in lines if line.strip()), "")
    if not first:
        return []
    if first.lstrip().startswith("[") or _IDS in first:
        return _token_rows(file)
    found = read_conversations(str(file), require_answer=False, field="--prompts").conversations
    prompts = []
    for conversation in found:
        messages = list(conversation.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        prompts.append(render_prompt(tokenizer, messages, conversation.tools, {}))
    return prompts


def check_prompts(
    prompts: Sequence[Sequence[int]], *, vocab_size: int, room: int, max_new_tokens: int
) -> None:
    """Raise UserError for prompts that no engine would accept.

    Args:
        room: positions that target and drafter both have, less those that drafts need.
    """
    for index, prompt in enumerate(prompts):
        where = f"prompt {index}"
        if not prompt:
            raise UserError("--prompts", where, "It is empty.")
        outside = [token for token in prompt if not 0 <= token < vocab_size]
        if outside:
            remedy = f"Token {outside[0]} is outside the target's vocabulary of {vocab_size}."
            raise UserError("--prompts", where, remedy)
        if len(prompt) + max_new_tokens > room:
            raise UserError(
                "--prompts",
                where,
                f"Its {len(prompt)} tokens and --max-new-tokens {max_new_tokens} are more than "
                f"the {room} that the target and the drafter allow; leave it out or lower --max-new-tokens.",
            )


def _token_rows(file: Path) -> Prompts:
    prompts = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError("--prompts", f"{file}:{number}", f"This is not JSON ({error.msg}).") from error
        ids = row.get(_IDS) if isinstance(row, dict) else row
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise UserError("--prompts", f"{file}:{number}", f"Expected {_IDS}: a list of token ids.")
        prompts.append(ids)
    return prompts
