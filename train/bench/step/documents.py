"""Documents for step benchmarks: token ids and masks, packed into rows, without a tokenizer."""

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

# Words, single digits and runs of punctuation, as the pre-tokenizers of Llama 3 and Qwen split text. Frequent
# words are one token there, so the lengths are similar.
_PIECES = re.compile(r" ?[^\W\d_]+|\d| ?[^\w\s]+|\s+|_")
# ChatML: <|im_start|>, role, line break before a turn; <|im_end|>, line break after it.
_HEAD, _TAIL = 3, 2
NUM_CONVERSATIONS = 2000
# Mean and standard deviation of the log lengths of GSM8K's questions and answers, in `_PIECES`.
_LOG_LENGTHS = ((3.98, 0.35), (4.68, 0.40))
_LOG_CORRELATION = 0.55


@dataclass(frozen=True)
class Document:
    """The tokens of one document, and which of them the assistant wrote."""

    input_ids: Tensor  # int64 [L]
    loss_mask: Tensor  # bool [L]


def read_documents(path: Path, vocab_size: int) -> list[Document]:
    """Read JSON lines with `question` and `answer`.

    Raises:
        UserError: the file cannot be read, or a line lacks these columns.
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
            remedy = f"Line {number} is not a JSON object with question and answer."
            raise UserError("--conversations", path, remedy) from None
        ids = [torch.tensor([zlib.crc32(p.encode()) % vocab_size for p in turn]) for turn in pieces]
        conversations.append(_chat(*ids))
    return conversations


def synthetic_documents(vocab_size: int, seed: int = 0) -> list[Document]:
    """Return random tokens with GSM8K's lengths: log-normal, with correlated questions and answers."""
    generator = np.random.Generator(np.random.PCG64(seed))
    (q_mean, q_std), (a_mean, a_std) = _LOG_LENGTHS
    covariance = _LOG_CORRELATION * q_std * a_std
    logs = generator.multivariate_normal(
        (q_mean, a_mean), [[q_std**2, covariance], [covariance, a_std**2]], NUM_CONVERSATIONS
    )
    lengths = torch.from_numpy(np.exp(logs)).round().long().clamp(4, 600).tolist()
    ids = torch.Generator().manual_seed(seed)
    return [_chat(*(torch.randint(vocab_size, (n,), generator=ids) for n in pair)) for pair in lengths]


def packed_rows(
    shape: Shape, num_rows: int, conversations: Path | None, seed: int = 0
) -> tuple[list[list[Document]], str]:
    """Return rows of a shape, and a description of their content."""
    if shape.content == "chat":
        if conversations is None:
            chats = synthetic_documents(shape.vocab_size, seed)
            source = "random tokens with GSM8K's lengths"
        else:
            chats = read_documents(conversations, shape.vocab_size)
            source = f"conversations of {conversations.name}"
        lengths = [len(chat.input_ids) for chat in chats]
        fitting = [i for i, length in enumerate(lengths) if length <= shape.row_tokens]
        rows = pack_epoch([lengths[i] for i in fitting], shape.row_tokens, seed, epoch=0)
        packed = [[chats[fitting[i]] for i in row] for row in rows]
        full = sorted(packed, key=_num_tokens, reverse=True)
        if not full:
            raise UserError("--conversations", conversations, f"None fits into {shape.row_tokens} tokens.")
        # Only the fullest rows, because the last rows of an epoch are not typical.
        rng = np.random.Generator(np.random.PCG64(seed))
        chosen = rng.permutation(max(1, len(full) * 3 // 4))[:num_rows]
        return [full[i] for i in chosen], source
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(shape.vocab_size, (num_rows, shape.row_tokens), generator=generator)
    mask, source = _whole_row(shape)
    return [[Document(row, mask)] for row in ids], source


def _whole_row(shape: Shape) -> tuple[Tensor, str]:
    """Return the mask of a row of one document, and a description of it."""
    indices = torch.arange(shape.row_tokens)
    if shape.content == "answers only":
        return torch.ones(shape.row_tokens, dtype=torch.bool), "one sequence, every token supervised"
    if shape.content == "long prompt":
        prompt = shape.row_tokens - 256
        return indices >= prompt, f"a prompt of {prompt:,} tokens and an answer of 256"
    assert shape.content == "one long chat", shape.content
    return indices % 256 >= 128, "one conversation, turns of 128 tokens, half of them the assistant's"


def _num_tokens(row: Sequence[Document]) -> int:
    return sum(len(chat.input_ids) for chat in row)


def _chat(question: Tensor, answer: Tensor) -> Document:
    """Return question and answer in ChatML; the mask covers the answer and the token that ends it."""
    filler = torch.zeros(_HEAD + _TAIL, dtype=torch.long)
    head, tail = filler.split((_HEAD, _TAIL))
    ids = torch.cat((head, question, tail, head, answer, tail))
    mask = torch.zeros(len(ids), dtype=torch.bool)
    start = len(ids) - _TAIL - len(answer)
    mask[start : len(ids) - _TAIL + 1] = True
    return Document(ids, mask)
