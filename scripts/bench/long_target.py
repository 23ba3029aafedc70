"""A small Llama that needs its context: it repeats records that it was given up to 8k tokens before."""

import hashlib
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice, product
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.cache import cache_directory
from data.embedded.corpus import ChatExample, Corpus, Message
from data.embedded.target import EmbeddedTarget, TargetSettings, ensure_built
from data.embedded.training import CausalModel, Document, encode, muon_step, set_gradients
from data.progress import Progress

FORMAT_VERSION = 2  # raise it for changes that do not change the settings
SHORTEST, SHORT, LONG = 64, 512, 8192  # tokens of conversations
NUM_CHATS = 5000  # that drafters are trained on
WORDS = ["".join(p) for p in product("bdfgklmnprstvzcj", "aeiou", "dgklmnrs", "aeiou", ("", "n"))][:5000]
CHAT_WORDS, RECORD_WORDS = WORDS[:64], WORDS[64:]
CONSTANT = 8  # elements that are equal in all embeddings
SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|' + message['role'] + '|>' -}}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{- message['content'] | trim + '<|end|>' -}}{%- endgeneration -%}
    {%- else -%}{{- message['content'] -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


class Phase(NamedTuple):
    """A part of the training."""

    longest: int  # conversation, in tokens; a step's have one length, which is log-uniform
    steps: int
    batch_tokens: int
    rate: float  # Muon


@dataclass(frozen=True)
class LongTargetSettings(TargetSettings):
    """A Llama of 1.8 M parameters, of which 0.5 M are trained; every word is a token of its vocabulary."""

    num_layers: int = 3
    num_kv_heads: int = 2
    intermediate_size: int = 256
    max_positions: int = 8704
    rope_theta: float = 1e7
    # It learns to look up what followed a word in the shortest conversations, and then at all lengths.
    phases: tuple[Phase, ...] = (Phase(SHORTEST, 300, 4096, 0.02), Phase(LONG, 250, LONG, 0.015))

    def new_tokenizer(self, examples: list[ChatExample]) -> PreTrainedTokenizerFast:
        """Return a tokenizer of whole words."""
        names = (*SPECIAL, ".", *WORDS)
        model = models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=SPECIAL[0])
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.add_special_tokens(list(SPECIAL))
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token=SPECIAL[0],
            eos_token=SPECIAL[1],
            chat_template=TEMPLATE,
            model_max_length=self.max_positions,
            clean_up_tokenization_spaces=False,
        )

    def new_model(self, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
        # Half of the pairs of a head's elements hardly turn within 8k positions.
        rope = {"rope_type": "default", "rope_theta": self.rope_theta}
        return LlamaForCausalLM(LlamaConfig(**self.arguments(tokenizer) | {"rope_parameters": rope}))

    def train(self, model: CausalModel, documents: list[Document], progress: bool) -> None:
        """Train the model on new conversations in every step; those that repeat delay the looking up."""
        fix_codes(model)
        rng, tokenizer = random.Random(0), self.new_tokenizer([])
        matrices: dict[torch.Size, list[Tensor]] = {}
        for one in model.parameters():
            if one.requires_grad and one.ndim == 2:
                matrices.setdefault(one.shape, []).append(one)
        momenta = {shape: [torch.zeros_like(one) for one in some] for shape, some in matrices.items()}
        norms = [one for one in model.parameters() if one.ndim == 1]
        adamw = torch.optim.AdamW(norms, lr=6e-3, betas=(0.9, 0.95), weight_decay=0.0)
        steps = [phase for phase in self.phases for _ in range(phase.steps)]
        with (
            ThreadPoolExecutor(2) as pool,
            Progress("train the target of records", len(steps), "steps", shown=progress) as bar,
        ):
            for step, phase in enumerate(steps):
                examples = step_conversations(rng, phase, chats=phase.longest > SHORTEST and step % 4 == 0)
                found = encode(tokenizer, examples, self.max_positions)
                loss = set_gradients(model, found, pool)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scale = min(1.0, (step + 1) / 30, (len(steps) - step) / 100)
                for shape, some in matrices.items():
                    muon_step(some, momenta[shape], phase.rate * scale)
                adamw.step()
                bar.note(f"loss {loss:.2f}")
                bar.update()


def step_conversations(rng: random.Random, phase: Phase, chats: bool) -> list[ChatExample]:
    """Return the conversations of a step, about records or chats."""
    length = 75 if chats else int(SHORTEST * (phase.longest / SHORTEST) ** rng.random())
    number = max(1, phase.batch_tokens // length)
    return [chat(rng) if chats else conversation(shuffled_words(rng), rng, length, "") for _ in range(number)]


@torch.no_grad()
def fix_codes(model: CausalModel) -> None:
    """Fix embedding and head at one random code per word, so that what works for some words does for all.

    Part of each embedding is equal for all words, so that a head can attend by position alone, to the token
    before; without it hundreds of steps do not find that. The first layer's output is far larger.
    """
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    codes = F.normalize(torch.randn(head.shape, generator=torch.Generator().manual_seed(0)))
    codes[:, :CONSTANT] = 0.0
    head.copy_(0.3 * codes)
    codes[:, :CONSTANT] = CONSTANT**-0.5
    embedding.copy_(0.2 * codes)
    for fixed in (embedding, head):
        fixed.requires_grad_(False)


def conversation(words: Iterator[str], rng: random.Random, num_tokens: int, name: str) -> ChatExample:
    """Return a conversation of about so many tokens, whose answers repeat records from anywhere before.

    A record is a list of up to 40 words, and no word is in two records. The user names its first word.

    Args:
        words: those of its records, taken from the iterator.
    """
    records: list[list[str]] = []
    tokens = 0
    while not records or tokens < 0.45 * num_tokens:
        longest = min(40, max(5, int(0.45 * num_tokens) - tokens))
        records.append(list(islice(words, rng.randint(4, longest))))
        tokens += len(records[-1]) + 1
    texts = [" ".join([*record, "."]) for record in records]
    told = rng.randint(1, len(texts))  # by the system message; the user tells the others
    messages = [Message(role="system", content="\n".join(texts[:told]))]
    later = texts[told:]
    while len(messages) == 1 or tokens < num_tokens:
        asked = rng.randrange(len(records))
        messages.append(Message(role="user", content="\n".join([*later, records[asked][0]])))
        messages.append(Message(role="assistant", content=texts[asked]))
        later = []
        tokens += len(records[asked]) + 5
    return ChatExample(id=name, messages=messages)


def shuffled_words(rng: random.Random) -> Iterator[str]:
    return iter(rng.sample(RECORD_WORDS, len(RECORD_WORDS)))


def chat(rng: random.Random) -> ChatExample:
    """Return a question and an answer in which mostly the two words before decide the next one."""
    question = rng.choices(CHAT_WORDS, k=rng.randint(4, 12))
    answer = question[-2:]
    for _ in range(rng.randint(30, 90)):
        answer.append(likely_word(*answer[-2:]) if rng.random() < 0.8 else rng.choice(CHAT_WORDS))
    texts = {"user": " ".join(question), "assistant": " ".join(answer)}
    return ChatExample(id="", messages=[Message(role=role, content=text) for role, text in texts.items()])


def likely_word(before: str, last: str) -> str:
    """Return the word that mostly follows two words of a chat."""
    return random.Random(f"{last} {ord(before[0]) % 4}").choice(CHAT_WORDS)


def ensure_long_target() -> EmbeddedTarget:
    """Return the target that is trained on records and chats; train it first if needed (four minutes)."""
    settings = LongTargetSettings()
    key = json.dumps([FORMAT_VERSION, "records", asdict(settings)])
    finished = cache_directory() / "embedded" / hashlib.sha256(key.encode()).hexdigest()[:16]
    return ensure_built(finished, read, settings, True)


def read() -> Corpus:
    """Return chats; the target's own conversations are made during its training."""
    rng = random.Random(0)
    return Corpus([chat(rng) for _ in range(8)], [chat(rng) for _ in range(400)])


def write_conversations(path: Path, tokens: int, total: int = 2_500_000) -> None:
    """Write what drafters are trained on: chats, and conversations about records of up to so many tokens.

    Each octave of lengths has as many tokens as any other.
    """
    rng = random.Random(1)
    found = [chat(rng) for _ in range(NUM_CHATS)]
    while total > 0:
        length = int(1 / (1 / SHORTEST - rng.random() * (1 / SHORTEST - 1 / tokens)))
        found.append(conversation(shuffled_words(rng), rng, length, f"records-{len(found)}"))
        total -= length
    write_jsonl(path, found)


def write_prompts(directory: Path) -> dict[str, Path]:
    """Write prompts that no training has: each a record and a question for it, and chats.

    No word is in two records of the domain, so the others make any of these prompts longer.
    """
    rng = random.Random(2)
    words = shuffled_words(rng)
    domains = {
        "records": [conversation(words, rng, 90, f"records-{index}") for index in range(110)],
        "chat": [chat(rng) for _ in range(200)],
    }
    paths = {name: directory / f"{name}.jsonl" for name in domains}
    for name, found in domains.items():
        write_jsonl(paths[name], found)
    return paths


def write_jsonl(path: Path, found: list[ChatExample]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in found))
