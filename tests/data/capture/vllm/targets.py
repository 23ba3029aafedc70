"""Random targets of sizes that vLLM's CPU kernels support, and references for capture by vLLM."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    PreTrainedModel,
)

from data.capture.hf import HiddenStateCapture
from data.capture.vllm.arguments import CaptureEngine
from data.samples import CapturedSample
from data.store import HiddenStateStore
from data.store.codec import decode, encode
from data.target.loading import load_target
from data.target.modules import locate
from data.target.parts import CapturedTarget, load_target_parts
from data.target.spec import TargetSpec

VOCAB_SIZE, MAX_TOKENS = 100, 150
KV_CACHE_BYTES = 64 << 20  # enough for all prompts; vLLM fills it with zeros first
ANSWER_TOKENS, STOP_TOKEN_IDS, NEAR_TIE = 12, (2, 57, 91), 1e-4
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def save_gqa(directory: Path) -> TargetSpec:
    torch.manual_seed(0)
    config = LlamaConfig(
        **COMMON,
        intermediate_size=96,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.1,
    )
    return _saved(LlamaForCausalLM(config), directory)


def save_hybrid(directory: Path) -> TargetSpec:
    """Layers with and without a sliding window, which vLLM keeps in different cache groups."""
    torch.manual_seed(0)
    config = MinistralConfig(
        **COMMON,
        intermediate_size=96,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.1,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    spec = _saved(MinistralForCausalLM(config), directory)
    path = directory / "config.json"  # vLLM has another name for the architecture
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["MistralForCausalLM"]}))
    return spec


def make_samples(num_samples: int, seed: int = 0) -> Dataset:
    """Return random ids. Every other sample has a common prefix, and some have the maximum length."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randint(VOCAB_SIZE, (MAX_TOKENS,), generator=generator).tolist()
    ids = []
    for i in range(num_samples):
        length = MAX_TOKENS if i % 10 == 0 else int(torch.randint(5, MAX_TOKENS, (), generator=generator))
        shared = length * 9 // 10 if i % 2 else 0
        own = torch.randint(VOCAB_SIZE, (length - shared,), generator=generator).tolist()
        ids.append(common[:shared] + own)
    return Dataset.from_dict(
        {"input_ids": ids, "loss_mask": [[False] * 2 + [True] * (len(i) - 2) for i in ids]}
    )


def capture_engine(
    spec: TargetSpec, aux_layer_ids: tuple[int, ...], root: Path, **extra: object
) -> CaptureEngine:
    extra = {"kv_cache_memory_bytes": KV_CACHE_BYTES} | extra
    return CaptureEngine(captured_target(spec, aux_layer_ids), MAX_TOKENS, [str(root)], extra)


def captured_target(spec: TargetSpec, aux_layer_ids: tuple[int, ...]) -> CapturedTarget:
    return CapturedTarget(spec, load_target_parts(spec), aux_layer_ids)


def largest_difference(
    store: HiddenStateStore | Sequence[CapturedSample],
    dataset: Dataset,
    spec: TargetSpec,
    aux_layer_ids: tuple[int, ...],
) -> float:
    """Return how far states are from those of transformers, relative to the largest of each layer."""
    model = load_target(spec, torch.device("cpu"))
    capture = HiddenStateCapture(model, locate(model), aux_layer_ids)
    of_length: dict[int, list[CapturedSample]] = {}  # which transformers computes together, without padding
    for i in range(len(store)):
        found, expected = store[i], dataset[i]
        assert found.input_ids.tolist() == expected["input_ids"]
        assert found.loss_mask.tolist() == expected["loss_mask"]
        of_length.setdefault(len(found.input_ids), []).append(found)
    difference = 0.0
    for samples in of_length.values():
        states = capture.capture([sample.input_ids for sample in samples])
        for sample, own in zip(samples, states, strict=True):
            expected = CapturedSample(sample.input_ids, sample.loss_mask, *own)
            found, kept = (decode(encode(one, "exact")) for one in (sample, expected))
            for ours, theirs in (
                (found.aux_hidden_states, kept.aux_hidden_states),
                (found.final_hidden_states[:, None], kept.final_hidden_states[:, None]),
            ):
                error = (ours - theirs).abs().amax(dim=(0, 2)) / theirs.abs().amax(dim=(0, 2))
                difference = max(difference, float(error.max()))
    return difference


def make_prompts(num_prompts: int) -> list[list[int]]:
    """Return prompts with room for `ANSWER_TOKENS` more tokens. Every other one has a common prefix."""
    rows = make_samples(num_prompts)["input_ids"]
    return [row[: MAX_TOKENS - ANSWER_TOKENS] for row in rows]


@torch.no_grad()
def greedy_answers(spec: TargetSpec, prompts: list[list[int]]) -> list[list[int]]:
    """Return completions by transformers, token by token, none of which is a near tie."""
    model = load_target(spec, torch.device("cpu"))
    answers = []
    for prompt in prompts:
        answer: list[int] = []
        while len(answer) < ANSWER_TOKENS and not (answer and answer[-1] in STOP_TOKEN_IDS):
            best = model(input_ids=torch.tensor([prompt + answer])).logits[0, -1].topk(2)
            assert best.values[0] - best.values[1] > NEAR_TIE
            answer.append(int(best.indices[0]))
        answers.append(answer)
    assert {len(answer) == ANSWER_TOKENS for answer in answers} == {True, False}
    return answers


@torch.no_grad()
def largest_shortfall(spec: TargetSpec, prompts: list[list[int]], answers: list[list[int]]) -> float:
    """Return how far the logit of a written token is below the best one, by transformers."""
    model = load_target(spec, torch.device("cpu"))
    shortfall = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        written = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        shortfall = max(shortfall, float((logits.amax(1) - written).max()))
    return shortfall


def make_hostile_directory(directory: Path) -> Path:
    """Make a user's directory whose modules have the names of our packages and cannot be imported."""
    (directory / "data").mkdir(parents=True)
    for name in ("data/__init__.py", "data.py", "train.py", "eagle31.py"):
        (directory / name).write_text(f"raise RuntimeError('the user's own {name} was imported')\n")
    return directory


def _saved(model: PreTrainedModel, directory: Path) -> TargetSpec:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(directory)
    return TargetSpec(str(directory))
