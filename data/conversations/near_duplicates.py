"""Conversations that say nearly the same as an earlier one, found by MinHash.

A conversation is the set of its sequences of five words; the similarity of two is the fraction of the
sequences of either that both have (Jaccard). It is estimated from 128 hashes of each (Broder, 1997), for
pairs that agree in a band of them (Indyk and Motwani, 1998). NumPy does it in 0.5 kB for each conversation
and on all cores; the index of `datasketch` takes 3 kB for each, in one process.
"""

import re
import unicodedata
import zlib
from functools import partial

import numpy as np
from numpy.typing import NDArray

from data.conversations.schemas import Conversation, Conversations
from data.conversations.workers import map_in_order
from data.progress import Progress

NUM_HASHES = 128
_SHINGLE_WORDS = 5
_MAX_MISSED = 0.01  # of the pairs that are just as similar as asked for
_CHUNK_CONVERSATIONS = 256
_CHUNK_SHINGLES = 4096
_CHUNK_PAIRS = 1 << 16
# Characters that are written without spaces are words by themselves.
_UNSPACED = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")

_Hashes = NDArray[np.uint64]


def near_duplicates(
    conversations: Conversations,
    similarity: float,
    *,
    with_answers: bool,
    num_workers: int = 1,
    progress: bool = False,
) -> NDArray[np.int64]:
    """Return the index of an earlier conversation that each is a near-duplicate of, or -1. [C]

    Args:
        similarity: the least similarity of near-duplicates, in (0, 1].
        with_answers: whether the assistant's messages are compared too; system prompts never are.
        num_workers: the number of processes that hash.
    """
    found = signatures(conversations, with_answers=with_answers, num_workers=num_workers, progress=progress)
    earlier = np.full(len(found), -1, dtype=np.int64)
    num_rows = _band_rows(similarity)
    for start in range(0, NUM_HASHES, num_rows):
        first, later = _same_band(found[:, start : start + num_rows])
        for chunk in range(0, len(first), _CHUNK_PAIRS):
            one, other = first[chunk : chunk + _CHUNK_PAIRS], later[chunk : chunk + _CHUNK_PAIRS]
            is_similar = (found[one] == found[other]).mean(axis=1) >= similarity
            earlier[other[is_similar]] = one[is_similar]
    return earlier


def signatures(
    conversations: Conversations, *, with_answers: bool, num_workers: int = 1, progress: bool = False
) -> NDArray[np.uint32]:
    """Return the least hashes of each conversation's sequences of words. [C, 128]"""
    found = np.empty((len(conversations), NUM_HASHES), dtype=np.uint32)
    starts = range(0, len(conversations), _CHUNK_CONVERSATIONS)
    chunks = (range(start, min(start + _CHUNK_CONVERSATIONS, len(found))) for start in starts)
    done = 0
    with Progress("compare", len(found), "conversations", shown=progress) as bar:
        for part in map_in_order(partial(_signatures, conversations, with_answers), chunks, num_workers):
            found[done : done + len(part)] = part
            done += len(part)
            bar.update(len(part))
    return found


def _signatures(conversations: Conversations, with_answers: bool, indices: range) -> NDArray[np.uint32]:
    texts = (_text(conversations[index], with_answers) for index in indices)
    return np.stack([_signature(text) for text in texts])


def _text(conversation: Conversation, with_answers: bool) -> str:
    left_out = ("system", "developer") if with_answers else ("system", "developer", "assistant")
    return "\n".join(m["content"] for m in conversation.messages if m["role"] not in left_out)


def _signature(text: str) -> NDArray[np.uint32]:
    """Return the least of each hash function over the text's sequences of words. [128]"""
    words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold()) or [text]
    hashes = np.fromiter((zlib.crc32(word.encode(errors="replace")) for word in words), np.uint64, len(words))
    num_shingles = max(len(words) - _SHINGLE_WORDS + 1, 1)
    shingles = np.zeros(num_shingles, dtype=np.uint64)
    for offset in range(min(_SHINGLE_WORDS, len(words))):
        shingles = (
            shingles * np.uint64(0x9E3779B97F4A7C15) + hashes[offset : offset + num_shingles] + np.uint64(1)
        )
    shingles = _mixed(shingles)
    least = np.full(NUM_HASHES, np.iinfo(np.uint32).max, dtype=np.uint32)
    for start in range(0, num_shingles, _CHUNK_SHINGLES):
        products = shingles[start : start + _CHUNK_SHINGLES] * _FACTORS[:, None] + _TERMS[:, None]
        np.minimum(least, (products >> np.uint64(32)).min(axis=1).astype(np.uint32), out=least)
    return least


def _mixed(values: _Hashes) -> _Hashes:
    """Return the values with all their bits mixed (the last step of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_FACTORS = _mixed(np.arange(1, NUM_HASHES + 1, dtype=np.uint64)) | np.uint64(1)
_TERMS = _mixed(np.arange(NUM_HASHES + 1, 2 * NUM_HASHES + 1, dtype=np.uint64))


def _band_rows(similarity: float) -> int:
    """Return the most hashes in a band with which hardly any pair that is similar enough is missed."""
    for num_rows in (16, 8, 4, 2):
        missed = (1 - similarity**num_rows) ** (NUM_HASHES // num_rows)
        if missed <= _MAX_MISSED:
            return num_rows
    return 1


def _same_band(band: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return pairs (earlier, later) with equal bands: with the first that has it, and with the one before."""
    keys = np.zeros(len(band), dtype=np.uint64)
    for column in band.T:
        keys = _mixed(keys * np.uint64(31) + column)
    order = np.argsort(keys, kind="stable")  # equal keys in the order of the conversations
    same = keys[order[1:]] == keys[order[:-1]]
    position = np.arange(len(order))
    begins = np.concatenate([[True], ~same])[: len(order)]
    first = np.maximum.accumulate(np.where(begins, position, 0))
    repeated = position[~begins]
    before = order[repeated - 1], order[repeated]
    of_first = order[first[repeated]], order[repeated]
    return np.concatenate([before[0], of_first[0]]), np.concatenate([before[1], of_first[1]])
