"""The target's tokenizer: loading it, and a fingerprint of how it turns text into ids."""

import hashlib
import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data.target.spec import TargetSpec
from eagle31.errors import UserError

TEMPLATE_FILE = "chat_template_file"  # the attribute of a tokenizer whose template a file replaces


def load_tokenizer(spec: TargetSpec, chat_template_file: str | None = None) -> PreTrainedTokenizerBase:
    """Load the target's tokenizer; `chat_template_file`, if given, replaces its chat template."""
    with spec.checkpoint.loading():
        tokenizer = AutoTokenizer.from_pretrained(
            spec.checkpoint.path, revision=spec.revision, trust_remote_code=spec.trust_remote_code
        )
    if not set(tokenizer.get_vocab().values()) - set(tokenizer.added_tokens_decoder):
        remedy = "Its tokenizer has no vocabulary; are files such as tokenizer.json missing?"
        raise UserError("target.model", spec.model, remedy)
    if chat_template_file is not None:
        try:
            template = Path(chat_template_file).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError, RuntimeError) as error:  # of UTF-8, and of nobody's home directory
            reason = error.strerror if isinstance(error, OSError) else error
            remedy = f"The file cannot be read ({reason}); give a file with a Jinja chat template."
            raise UserError("target.chat_template", chat_template_file, remedy) from error
        if not template.strip():
            raise UserError("target.chat_template", chat_template_file, "The file is empty.")
        tokenizer.chat_template = template
        setattr(tokenizer, TEMPLATE_FILE, chat_template_file)
    return tokenizer


def check_ids(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], vocab_size: int) -> None:
    """Raise UserError for a token that the target does not have.

    Args:
        vocab_size: of the target; tokenizers may have more tokens, as long as no text has them.
    """
    largest = max(ids, default=0)
    if largest >= vocab_size:
        token = tokenizer.convert_ids_to_tokens(largest)
        remedy = (
            f"The model has {vocab_size} tokens, and the tokenizer, or a row of token ids, gives token "
            f"{largest} ({token!r}): the two belong to different models."
        )
        raise UserError("target.model", tokenizer.name_or_path, remedy)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the sha256 of everything that turns text into ids; the chat template is not part of it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content = {"vocab": tokenizer.get_vocab(), "class": type(tokenizer).__name__}
        content |= {"files": _vocabulary_files(tokenizer)}
    else:
        # The last call of the tokenizer sets padding and truncation.
        content = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
    module = sys.modules[type(tokenizer).__module__]
    if not module.__name__.startswith("transformers."):
        content |= {"code": inspect.getsource(module)}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return hashlib.sha256(json.dumps([content, special], sort_keys=True).encode()).hexdigest()


def _vocabulary_files(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the sha256 of the files that a tokenizer in Python reads.

    Its vocabulary has no merges and no scores.
    """
    files = {}
    for name, file in tokenizer.vocab_files_names.items():
        path = Path(getattr(tokenizer, name, None) or Path(tokenizer.name_or_path, file))
        if path.is_file():
            files[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return files
