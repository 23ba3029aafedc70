"""Conversations that say nearly the same as an earlier one, found by MinHash (`datasketch`).

A conversation is the set of its sequences of five words; the similarity of two is the fraction of the
sequences of either that both have (Jaccard), estimated from 128 hashes of each.
"""

import re
import unicodedata
from functools import partial

import numpy as np
from datasketch import LeanMinHash, MinHash, MinHashLSH
from numpy.typing import NDArray

from data.conversations.schemas import SYSTEM_ROLES, Conversation, Conversations
from data.conversations.workers import map_in_order
from data.progress import Progress

_NUM_HASHES = 128
_SHINGLE_WORDS = 5
_CHUNK_CONVERSATIONS = 256
# A pair that is missed stays in the data; one that is found wrongly is compared by all its hashes.
_WEIGHTS = (0.01, 0.99)  # of false positives and false negatives
# Characters that are written without spaces are words by themselves.
_UNSPACED = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


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
    index = MinHashLSH(min(similarity, 0.95), num_perm=_NUM_HASHES, weights=_WEIGHTS)
    hashes: list[LeanMinHash] = []
    earlier = np.full(len(conversations), -1, dtype=np.int64)
    starts = range(0, len(conversations), _CHUNK_CONVERSATIONS)
    chunks = (range(start, min(start + _CHUNK_CONVERSATIONS, len(earlier))) for start in starts)
    hash_chunk = partial(_hashes, conversations, with_answers)
    with Progress("compare", len(earlier), "conversations", shown=progress) as bar:
        for chunk in map_in_order(hash_chunk, chunks, num_workers):
            for one in chunk:
                number = len(hashes)
                similar = (i for i in sorted(index.query(one)) if hashes[i].jaccard(one) >= similarity)
                earlier[number] = next(similar, -1)
                index.insert(number, one)
                hashes.append(one)
            bar.update(len(chunk))
    return earlier


def _hashes(conversations: Conversations, with_answers: bool, indices: range) -> list[LeanMinHash]:
    shingles = (_shingles(_text(conversations[index], with_answers)) for index in indices)
    return [LeanMinHash(one) for one in MinHash.generator(shingles, num_perm=_NUM_HASHES)]


def _text(conversation: Conversation, with_answers: bool) -> str:
    left_out = SYSTEM_ROLES if with_answers else (*SYSTEM_ROLES, "assistant")
    return "\n".join(m["content"] for m in conversation.messages if m["role"] not in left_out)


def _shingles(text: str) -> list[bytes]:
    words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold()) or [text]
    starts = range(max(len(words) - _SHINGLE_WORDS + 1, 1))
    return [" ".join(words[start : start + _SHINGLE_WORDS]).encode() for start in starts]
