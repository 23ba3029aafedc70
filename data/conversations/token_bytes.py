"""Where the tokens of a text end, without encoding parts of it again."""

import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from transformers import PreTrainedTokenizerBase


def token_ends(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int]) -> list[int] | None:
    """Return the number of bytes of the text up to the end of each token. [N]

    None for a tokenizer whose tokens are not bytes, or where the tokens do not give exactly this text, for
    example after a normalization. A tokenizer's own character offsets would not do: byte-level ones can leave
    white space out of a token's span.
    """
    known = _bytes_of_tokens(tokenizer)
    if known is None:
        return None
    parts = [known.get(id, b"") for id in ids]
    return list(accumulate(map(len, parts))) if b"".join(parts) == text.encode(errors="replace") else None


@lru_cache(maxsize=4)
def _bytes_of_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes] | None:
    """Return the bytes of each token id of a byte-level tokenizer; None for another one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return None
    if json.loads(backend.decoder.__getstate__())["type"] != "ByteLevel":
        return None
    byte_of = _byte_of_characters()
    found = {}
    for token, id in tokenizer.get_vocab().items():
        if all(character in byte_of for character in token):
            found[id] = bytes(byte_of[character] for character in token)
    # They are written as they are.
    return found | {id: str(token).encode() for id, token in tokenizer.added_tokens_decoder.items()}


def _byte_of_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level token stands for, as GPT-2 has them."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    found = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return found | {chr(256 + index): byte for index, byte in enumerate(others)}
