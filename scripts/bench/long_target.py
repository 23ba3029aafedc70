"""A small Llama that needs its context: it repeats records that it was given up to 8k tokens before."""

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice, product
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.embedded.corpus import ChatExample, Corpus, Message
from data.embedded.target import EmbeddedTarget, TargetSettings, ensure_built
from data.embedded.training import CausalModel, Document, TrainingSettings, pretrain

FORMAT_VERSION = 1  # raise it for changes that do not change the settings
SHORT, LONG = 512, 8192  # tokens of the longest conversations
NUM_SHORT, NUM_LONG = 2500, 150  # conversations that the target is trained on
WORDS = ["".join(parts) for parts in product("bdfgklmnprstvzcj", "aeio", "dgklmnrs", "aeiu")]
ROPE_THETA = 1e9
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
Record = tuple[str, str]  # its key, and the text that begins with the key


@dataclass(frozen=True)
class LongTargetSettings(TargetSettings):
    """A Llama of 0.9 M parameters, in whose vocabulary every word is a token."""

    num_layers: int = 3
    num_kv_heads: int = 2
    max_positions: int = 8704
    # Looking up and copying is learned next to chat, then at length.
    phases: tuple[TrainingSettings, ...] = (
        TrainingSettings(200, 4096, 10, SHORT),
        TrainingSettings(50, LONG, 5, LONG),
    )
    training: TrainingSettings = field(default_factory=lambda: TrainingSettings(max_document_tokens=LONG))

    def new_tokenizer(self, examples: list[ChatExample]) -> PreTrainedTokenizerFast:
        """Return a tokenizer of whole words."""
        names = (*SPECIAL, "record", "is", ".", *WORDS)
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
        rope = {"rope_type": "default", "rope_theta": ROPE_THETA}
        return LlamaForCausalLM(LlamaConfig(**self.arguments(tokenizer) | {"rope_parameters": rope}))

    def train(self, model: CausalModel, documents: list[Document], progress: bool) -> None:
        prepare_copying(model)
        short, longer = documents[:-NUM_LONG], documents[-NUM_LONG:]
        for chosen, phase in zip((short, [*longer, *short[::8]]), self.phases, strict=True):
            pretrain(model, chosen, phase, progress, rate_scale=0.5)


@torch.no_grad()
def prepare_copying(model: CausalModel) -> None:
    """Let the first weights look up what followed the current token; a short training would not find it.

    Half of the state has the token's code and a constant. In the first layer a head writes the code of the
    token before into the other half, and in the second layer both heads attend to keys for which that is the
    current token's code, and copy their code.
    """
    head = model.config.hidden_size // model.config.num_attention_heads
    half = head // 2
    first, second = (model.model.layers[index].self_attn for index in (0, 1))
    embedding = model.model.embed_tokens.weight
    embedding[:, 0], embedding[:, head:] = 3.0, 0.0
    model.lm_head.weight.copy_(0.3 * embedding)
    model.lm_head.weight[:, 0] = 0.0
    constant = float(embedding[0, 0] / embedding.square().mean().sqrt())

    # The sum of cosines of the distance minus 1 is greatest one token back.
    turns = ROPE_THETA ** -(torch.arange(half // 4) / half)
    size = 12 / constant
    for projection in (first.q_proj, first.k_proj):
        projection.weight[:head] = 0.0
    for projection in (second.q_proj, second.k_proj):
        projection.weight.zero_()
    first.q_proj.weight[: half // 4, 0] = size
    first.k_proj.weight[: half // 4, 0] = size * turns.cos()
    first.k_proj.weight[half : half + half // 4, 0] = size * turns.sin()
    first.v_proj.weight[:head] = torch.eye(head, 2 * head)
    first.o_proj.weight[head:, :head] = torch.eye(head)
    first.o_proj.weight[head, 0] = 0.0

    slow = torch.cat([torch.arange(half // 2, half), torch.arange(half // 2, half) + half])
    code = torch.arange(half)
    for index in range(2):
        second.q_proj.weight[index * head + slow, index * half + code] = 3.0
        second.k_proj.weight[index * head + slow, head + index * half + code] = 3.0
        second.v_proj.weight[index * head : (index + 1) * head] = torch.eye(head, 2 * head)
        second.o_proj.weight[:, index * head : (index + 1) * head] = 2 * torch.eye(2 * head, head)
    second.q_proj.weight[:, 0] = 0.0


def records(rng: random.Random) -> Iterator[Record]:
    """Yield records; no key comes twice."""
    seen = set()
    while True:
        key = f"record {rng.choice(WORDS)} {rng.choice(WORDS)} is"
        if key not in seen:
            seen.add(key)
            yield key, f"{key} {' '.join(rng.choices(WORDS, k=14))} ."


def conversation(source: Iterator[Record], rng: random.Random, num_tokens: int, name: str) -> ChatExample:
    """Return a conversation of about so many tokens, whose answers repeat records from anywhere before."""
    given: list[Record] = []
    texts: list[str] = []
    tokens = 0
    while not given or tokens < 0.6 * num_tokens:
        block = list(islice(source, rng.randint(1, 4)))
        given += block
        texts.append("\n".join(text for _, text in block))
        tokens += 19 * len(block)
    messages = [Message(role="system", content=texts.pop(0))]
    while len(messages) == 1 or tokens < num_tokens - 120:
        asked = rng.sample(given, min(4, len(given)))
        question = "\n\n".join([*texts, "\n".join(key for key, _ in asked)])
        messages.append(Message(role="user", content=question))
        messages.append(Message(role="assistant", content="\n".join(text for _, text in asked)))
        texts = []
        tokens += 24 * len(asked) + 10
    return ChatExample(id=name, messages=messages)


def conversations(rng: random.Random, number: int, shortest: int, longest: int) -> list[ChatExample]:
    """Return conversations whose lengths are log-uniform."""
    lengths = [int(shortest * (longest / shortest) ** rng.random()) for _ in range(number)]
    return [conversation(records(rng), rng, one, f"{longest}-{index}") for index, one in enumerate(lengths)]


def ensure_long_target(cache_dir: Path, settings: LongTargetSettings | None = None) -> EmbeddedTarget:
    """Return the target that is trained on records and chats; train it first if needed (four minutes)."""
    settings = settings or LongTargetSettings()
    key = json.dumps([FORMAT_VERSION, "records", asdict(settings)])
    return ensure_built(cache_dir / hashlib.sha256(key.encode()).hexdigest()[:16], read, settings, True)


def read() -> Corpus:
    rng = random.Random(0)
    short, longer = conversations(rng, NUM_SHORT, 40, 480), conversations(rng, NUM_LONG, SHORT, 8000)
    return Corpus([*short, *(chat(rng) for _ in range(NUM_SHORT)), *longer], [chat(rng) for _ in range(400)])


def chat(rng: random.Random) -> ChatExample:
    """Return a question and an answer in which mostly the word before decides the next one."""
    words = WORDS[::32]
    question = rng.choices(words, k=rng.randint(4, 12))
    answer = question[-2:]
    for _ in range(rng.randint(30, 90)):
        likely = random.Random(f"{answer[-1]} {ord(answer[-2][0]) % 4}").choice(words)
        answer.append(likely if rng.random() < 0.8 else rng.choice(words))
    texts = {"user": " ".join(question), "assistant": " ".join(answer)}
    return ChatExample(id="", messages=[Message(role=role, content=text) for role, text in texts.items()])


def write_conversations(path: Path, tokens: int) -> None:
    """Write what drafters are trained on: chats, and conversations about records of up to so many tokens."""
    rng = random.Random(1)
    found = [chat(rng) for _ in range(2000)]
    left = 450_000
    while left > 0:
        length = int(160 * (0.94 * tokens / 160) ** rng.random())
        found.append(conversation(records(rng), rng, length, f"records-{len(found)}"))
        left -= length
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in found))


def write_prompts(directory: Path) -> dict[str, Path]:
    """Write prompts that no training has: up to four records and a question for them, and chats."""
    rng = random.Random(2)
    source = records(rng)
    domains = {
        "records": [conversation(source, rng, 1, f"records-{index}") for index in range(200)],
        "chat": [chat(rng) for _ in range(200)],
    }
    paths = {name: directory / f"{name}.jsonl" for name in domains}
    for name, found in domains.items():
        paths[name].write_text("".join(json.dumps(one) + "\n" for one in found))
    return paths
