"""Decoding, evaluation and export on a GPU, with a target of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data.target.cached_decoding import TargetDecoder
from data.target.modules import locate
from data.target.spec import TargetSpec
from eagle31.decoding.speculative import decode_speculatively
from eagle31.export.layouts import read_tensors
from eagle31.export.write import write_export
from eagle31.model.config import DrafterConfig
from eagle31.model.vocab import build_draft_vocab
from tests.eagle31.tiny import VOCAB, random_batch
from tests.pretended_gpu.pretended_gpu import CUDA, PretendedGpu, to_gpu
from tests.pretended_gpu.steps import configuration, drafter_on_gpu
from train.evaluation.decoding import PassResults, decode_in_turns, decoding_report, greedy_sides
from train.evaluation.replay import sampling_report

PROMPT = [1, 2, 3, 4]
LIMITS: dict[str, Any] = {"max_new_tokens": 6, "eos_token_ids": (VOCAB + 1,)}
BF16, FP32 = torch.bfloat16, torch.float32


def decoder(config: DrafterConfig, dtype: torch.dtype) -> TargetDecoder:
    """Return a random target on the GPU."""
    shape = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=config.target_hidden_size,
        intermediate_size=24,
        num_hidden_layers=max(config.aux_layer_ids) + 1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    model = LlamaForCausalLM(shape).eval().requires_grad_(False)
    to_gpu(model, dtype)
    return TargetDecoder(model, locate(model, TargetSpec("tiny")), config.aux_layer_ids)


@pytest.mark.parametrize(
    ("attention", "dtype", "pruned", "temperature"),
    [("gqa", BF16, True, 0.0), ("mla", BF16, False, 0.7), ("mla", FP32, True, 0.0), ("gqa", FP32, True, 0.7)],
)
def test_speculative_decoding(attention: str, dtype: torch.dtype, pruned: bool, temperature: float) -> None:
    """What is read of the device is arbitrary, so that drafts are accepted and rejected."""
    config = configuration(attention, pruned=pruned)
    with PretendedGpu() as gpu:
        drafter, frozen = drafter_on_gpu(config, dtype)
        decoded = decode_speculatively(
            decoder(config, dtype),
            drafter,
            frozen,
            PROMPT,
            draft_tokens=3,
            temperature=temperature,
            generator=torch.Generator(CUDA).manual_seed(0),
            **LIMITS,
        )
        by_draft = [wait for wait in gpu.waits if wait.place.startswith("eagle31/decoding/chain.py")]
    assert len(decoded.token_ids) == LIMITS["max_new_tokens"]
    assert 0 < sum(decoded.accepted) < 3 * len(decoded.drafts)
    # Of a draft each token is read, and sent but for the last; so are its margins and one index. Sampling
    # draws one more token for each draft and for the prompt.
    assert len(by_draft) <= len(decoded.drafts) * (3 + 2 + 1 + 1 + 1) + 1


def test_evaluation_decodes_and_replays(tmp_path: Path) -> None:
    config = configuration("gqa")
    batch = random_batch((20, 12), config, dtype=BF16)
    with PretendedGpu():
        drafter, frozen = drafter_on_gpu(config, BF16)
        target = decoder(config, BF16)
        sides = greedy_sides(target, drafter, frozen, draft_tokens=2, eos_token_ids=LIMITS["eos_token_ids"])
        pairs = decode_in_turns([PROMPT], *sides, LIMITS["max_new_tokens"], PassResults(tmp_path))
        report = decoding_report(pairs, 2)
        sampling = sampling_report(drafter, frozen, [batch], 3, temperature=0.7)
    assert report["num_tokens"] == LIMITS["max_new_tokens"]
    assert sampling is not None
    assert [row["k"] for row in sampling["sampled_drafts"]["by_draft_length"]] == [1, 2, 3]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("attention", ["gqa", "mla"])
def test_weights_on_the_gpu_are_exported(attention: str, dtype: str, tmp_path: Path) -> None:
    config = configuration(attention)
    vocab = build_draft_vocab(torch.arange(VOCAB), config.draft_vocab_size, [0])
    with PretendedGpu():
        drafter, frozen = drafter_on_gpu(config, FP32)
        state = dict(drafter.named_parameters())
        export = tmp_path / "export"
        write_export(export, config, state, vocab, frozen.embed_tokens.to(BF16), dtype=dtype, provenance={})
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in read_tensors(export).items()}
    head = found.pop("lm_head.weight")
    assert head == (getattr(torch, dtype), (config.draft_vocab_size, config.hidden_size))
    assert found.pop("embed_tokens.weight") == (BF16, (VOCAB, config.hidden_size))
    assert found.pop("d2t") == (torch.int64, (config.draft_vocab_size,))
    assert found.pop("t2d") == (torch.bool, (VOCAB,))
    assert {one for one, _ in found.values()} == {getattr(torch, dtype)}
