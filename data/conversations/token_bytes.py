"""Where the tokens of a text end, without encoding parts of it again."""

import re
from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_SPACE, _BYTE = "\u2581", re.compile("<0x[0-9A-F]{2}>")  # in SentencePiece's pieces


def token_ends(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int]) -> list[int] | None:
    """Return the number of bytes of the text up to the end of each token. [N]

    None where the tokens do not give exactly this text, for example after a normalization. A tokenizer's own
    character offsets would not do: byte-level ones can leave white space out of a token's span.
    """
    known, content, end = _bytes_of_tokens(tokenizer), text.encode(errors="replace"), 0
    ends = []
    for id in ids:
        part = known.get(id, b"")
        if not content.startswith(part, end):
            part = part.removeprefix(b" ")  # SentencePiece puts a space before the first word
            if not content.startswith(part, end):
                return None
        end += len(part)
        ends.append(end)
    return ends if end == len(content) else None


def normalized(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return the text that a tokenizer reads, such as NFC, with which Qwen's joins letters and accents."""
    normalizer = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast else None
    return normalizer.normalize_str(text) if normalizer is not None else text


@lru_cache(maxsize=4)
def _bytes_of_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """Return the bytes of each token id, as byte-level tokenizers or as SentencePiece's have them."""
    vocab, byte_of = tokenizer.get_vocab(), {text: byte for byte, text in bytes_to_unicode().items()}
    if any(token.startswith(_SPACE) for token in vocab):
        found = {id: _bytes_of_piece(token) for token, id in vocab.items()}
    else:
        found = {
            id: bytes(byte_of[character] for character in token)
            for token, id in vocab.items()
            if byte_of.keys() >= set(token)
        }
    added = {id: str(token) for id, token in tokenizer.added_tokens_decoder.items()}
    # They are written as they are.
    return found | {id: token.encode() for id, token in added.items() if not _BYTE.fullmatch(token)}


def _bytes_of_piece(piece: str) -> bytes:
    """Return the bytes of one of SentencePiece's pieces; a byte that no other piece has is written <0x0A>."""
    if _BYTE.fullmatch(piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(_SPACE, " ").encode()
