"""What identifies a target's weights and its tokenizer."""

import hashlib
import json

from transformers import (
    PreTrainedTokenizerBase,
)

from data.target.spec import TargetSpec


def target_fingerprint(spec: TargetSpec) -> str:
    """What identifies the target's weights: the commit of a hub model, a sha256 of a local directory."""
    return spec.checkpoint.fingerprint()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of what turns text into ids; the chat template is not part of it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content = {"vocab": tokenizer.get_vocab(), "class": type(tokenizer).__name__}
    else:
        # Padding and truncation are what the last call of the tokenizer left behind.
        content = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return hashlib.sha256(json.dumps([content, special], sort_keys=True).encode()).hexdigest()
