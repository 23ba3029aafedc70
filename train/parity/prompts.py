"""The prompts to decode, as token ids."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from data.conversations.prompts import render_prompt
from data.conversations.reading import read_conversations
from data.conversations.saved import load_saved
from eagle31.errors import UserError
from train.evaluation.matrix import prompt_messages

Prompts = list[list[int]]


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
    """Return the prompts of a file's conversations, each up to the turn that the target writes.

    Raises:
        UserError: the file does not exist or has no conversations.
    """
    if not file.is_file():
        raise UserError("--prompts", file, "No such file.")
    found = read_conversations(str(file), require_answer=False, field="--prompts").conversations
    return [render_prompt(tokenizer, prompt_messages(one), one.tools, {}) for one in found]


def check_prompts(prompts: Sequence[Sequence[int]], *, room: int, max_new_tokens: int) -> None:
    """Raise UserError for prompts that are too long.

    Args:
        room: positions that target and drafter both have, less those that drafts need.
    """
    for index, prompt in enumerate(prompts):
        if len(prompt) + max_new_tokens > room:
            raise UserError(
                "--prompts",
                f"prompt {index}",
                f"Its {len(prompt)} tokens and --max-new-tokens {max_new_tokens} are more than "
                f"the {room} that the target and the drafter allow; leave it out or lower --max-new-tokens.",
            )
