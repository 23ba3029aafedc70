"""A small Qwen3 that is trained on given questions and answers, and cached next to the embedded target."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from data.embedded.corpus import ChatExample, Corpus, Message, is_held_out
from data.embedded.target import EmbeddedTarget, TargetSettings, ensure_built
from data.embedded.training import TrainingSettings
from eagle31.errors import UserError
from eagle31.json_files import read_jsonl

FORMAT_VERSION = 3  # raise it for changes that do not change the settings


@dataclass(frozen=True)
class ChatTargetSettings(TargetSettings):
    """A Qwen3 of 5.8 M parameters, which two cores train in some minutes; every field is part of the key."""

    hidden_size: int = 256
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 352
    training: TrainingSettings = field(default_factory=lambda: TrainingSettings(steps=440))

    def new_model(self, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
        """Return the model that is trained, with any weights."""
        head_dim = self.hidden_size // self.num_heads  # Qwen3's default is 128 for every width
        return Qwen3ForCausalLM(Qwen3Config(**self.arguments(tokenizer), head_dim=head_dim))


def ensure_chat_target(
    cache_dir: Path,
    conversations: Path,
    *,
    settings: ChatTargetSettings | None = None,
) -> EmbeddedTarget:
    """Return the target that is trained on the conversations; train it first if needed.

    Args:
        cache_dir: has one directory per fingerprint of the file's content and the settings.
        conversations: JSON lines with `question` and `answer`.
        settings: the shape and training; None uses the defaults.
    """
    settings = settings or ChatTargetSettings()
    corpus = read_chats(conversations)
    # The split is part of the content.
    key = json.dumps([FORMAT_VERSION, "qwen3", corpus.train, corpus.held_out, asdict(settings)])
    finished = cache_dir / hashlib.sha256(key.encode()).hexdigest()[:16]
    return ensure_built(finished, lambda: corpus, settings, progress=True)


def read_answered(path: Path) -> list[dict[str, str]]:
    """Read JSON lines with `question` and `answer`.

    Raises:
        UserError: there is no such file, or a line lacks one of the two.
    """
    rows = read_jsonl(path) if path.is_file() else []
    if not rows or not all({"question", "answer"} <= row.keys() for row in rows):
        remedy = "Give a file of JSON lines that have `question` and `answer`, such as GSM8K's."
        raise UserError("--conversations", str(path), remedy)
    return rows


def read_chats(path: Path) -> Corpus:
    """Read JSON lines with `question` and `answer`, without repeated questions, split by the question."""
    answers: dict[str, str] = {}
    for row in read_answered(path):
        answers.setdefault(row["question"], row["answer"])
    corpus = Corpus([], [])
    for number, (question, answer) in enumerate(answers.items()):
        user = Message(role="user", content=question)
        example = ChatExample(id=str(number), messages=[user, Message(role="assistant", content=answer)])
        (corpus.held_out if is_held_out(question) else corpus.train).append(example)
    return corpus
