"""The conversations of a measurement: token ids and masks, packed into rows. No tokenizer is downloaded."""

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.batches.packing import pack_epoch
from eagle31.errors import UserError
from train.bench.step.shapes import Shape

# Words, single digits and runs of punctuation, as the pre-tokenizers of Llama 3 and Qwen cut text: frequent
# words are one token there, so the lengths are close to theirs.
_PIECES = re.compile(r" ?[^\W\d_]+|\d| ?[^\w\s]+|\s+|_")
# ChatML: <|im_start|>, role, line break before a turn; <|im_end|>, line break after it.
_HEAD, _TAIL = 3, 2
NUM_CONVERSATIONS = 2000
# Of question and answer of GSM8K's training set under `_PIECES`: mean and deviation of log lengths.
_LOG_LENGTHS = ((3.98, 0.35), (4.68, 0.40))
_LOG_CORRELATION = 0.55


@dataclass(frozen=True)
class Conversation:
    """One document: its tokens, and which of them the assistant wrote."""

    input_ids: Tensor  # int64 [L]
    loss_mask: Tensor  # bool [L]


def read_conversations(path: Path, vocab_size: int) -> list[Conversation]:
    """JSON lines with `question` and `answer`.

    Raises:
        UserError: the file is not there, or a line has no such columns.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()[:NUM_CONVERSATIONS]
    except OSError as error:
        raise UserError("--conversations", path, f"It cannot be read: {error.strerror}.") from None
    conversations = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            pieces = [_PIECES.findall(row[name]) for name in ("question", "answer")]
        except (ValueError, KeyError, TypeError):
            remedy = f"Line {number} is no JSON object with question and answer."
            raise UserError("--conversations", path, remedy) from None
        ids = [torch.tensor([zlib.crc32(p.encode()) % vocab_size for p in turn]) for turn in pieces]
        conversations.append(_conversation(*ids))
    return conversations


def synthetic_conversations(vocab_size: int, seed: int = 0) -> list[Conversation]:
    """Random tokens with GSM8K's lengths: log-normal questions and answers, correlated as there."""
    generator = np.random.Generator(np.random.PCG64(seed))
    (q_mean, q_std), (a_mean, a_std) = _LOG_LENGTHS
    covariance = _LOG_CORRELATION * q_std * a_std
    logs = generator.multivariate_normal(
        (q_mean, a_mean), [[q_std**2, covariance], [covariance, a_std**2]], NUM_CONVERSATIONS
    )
    lengths = np.exp(logs).round().astype(int).clip(4, 600)
    ids = torch.Generator().manual_seed(seed)
    return [
        _conversation(*(torch.randint(vocab_size, (int(n),), generator=ids) for n in pair))
        for pair in lengths
    ]


def packed_rows(
    shape: Shape, num_rows: int, conversations: Path | None, seed: int = 0
) -> tuple[list[list[Conversation]], str]:
    """Rows of a shape, and in words what they hold."""
    if shape.text == "chat":
        if conversations is None:
            chats = synthetic_conversations(shape.vocab_size, seed)
            source = "random tokens with GSM8K's lengths"
        else:
            chats = read_conversations(conversations, shape.vocab_size)
            source = f"conversations of {conversations.name}"
        lengths = [len(chat.input_ids) for chat in chats]
        fitting = [i for i, length in enumerate(lengths) if length <= shape.row_tokens]
        rows = pack_epoch([lengths[i] for i in fitting], shape.row_tokens, seed, epoch=0)
        packed = [[chats[fitting[i]] for i in row] for row in rows]
        full = sorted(packed, key=_num_tokens, reverse=True)
        if not full:
            raise UserError("--conversations", conversations, f"None fits into {shape.row_tokens} tokens.")
        # The fullest rows: what is left over at the end of an epoch stands for no step.
        rng = np.random.Generator(np.random.PCG64(seed))
        chosen = rng.permutation(max(1, len(full) * 3 // 4))[:num_rows]
        return [full[i] for i in chosen], source
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(shape.vocab_size, (num_rows, shape.row_tokens), generator=generator)
    mask, source = _whole_row(shape)
    return [[Conversation(row, mask)] for row in ids], source


def _whole_row(shape: Shape) -> tuple[Tensor, str]:
    """The mask of a row that is one document, and in words what it is."""
    at = torch.arange(shape.row_tokens)
    if shape.text == "answers only":
        return torch.ones(shape.row_tokens, dtype=torch.bool), "one sequence, every token counted"
    if shape.text == "long prompt":
        prompt = shape.row_tokens - 256
        return at >= prompt, f"a prompt of {prompt:,} tokens and an answer of 256"
    assert shape.text == "one long chat", shape.text
    return at % 256 >= 128, "one conversation, turns of 128 tokens, half of them the assistant's"


def _num_tokens(row: Sequence[Conversation]) -> int:
    return sum(len(chat.input_ids) for chat in row)


def _conversation(question: Tensor, answer: Tensor) -> Conversation:
    """ChatML around both; the mask covers the answer and the token that ends it."""
    filler = torch.zeros(_HEAD + _TAIL, dtype=torch.long)
    head, tail = filler.split((_HEAD, _TAIL))
    ids = torch.cat((head, question, tail, head, answer, tail))
    mask = torch.zeros(len(ids), dtype=torch.bool)
    start = len(ids) - _TAIL - len(answer)
    mask[start : len(ids) - _TAIL + 1] = True
    return Conversation(ids, mask)
