"""Samples of 65,536 tokens, from a server that prefills them in chunks."""

import contextlib
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from data.capture.vllm.client import VllmClient
from data.store import HiddenStateStore
from data.target.spec import TargetSpec
from tests.data.capture.vllm import targets
from tests.data.capture.vllm.capturing import KEY, STALL_SECONDS, capture_store, server_process

NUM_TOKENS, IDS = 65_536, (0,)


@pytest.mark.full("20 CPU seconds for vLLM's start, and as many for attention to 65,536 tokens")
def test_samples_of_65536_tokens_pass_a_spool_that_holds_one(
    vllm_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "MAX_TOKENS", NUM_TOKENS)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "max_position_embeddings": NUM_TOKENS + 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32}
    config = LlamaConfig(**targets.COMMON | sizes, **heads, intermediate_size=32, initializer_range=0.1)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    spec = TargetSpec(str(tmp_path / "target"))
    ids = [torch.randint(3, targets.VOCAB_SIZE, (n,)).tolist() for n in (NUM_TOKENS, 40, NUM_TOKENS - 100)]
    masks = [[False] * (len(row) // 2) + [True] * (len(row) - len(row) // 2) for row in ids]
    dataset = Dataset.from_dict({"input_ids": ids, "loss_mask": masks})
    engine = targets.capture_engine(spec, IDS, tmp_path, max_num_batched_tokens=4096)
    server = server_process(engine.command_line(), tmp_path / "server.log", STALL_SECONDS)
    with contextlib.closing(server):
        server.wait_until_ready(progress=False)
        client, target = VllmClient(server.url, 2, KEY), targets.captured_target(spec, IDS)
        capture_store(client, dataset, tmp_path / "store", target, tmp_path, spool_gb=0.02)
    store = HiddenStateStore(tmp_path / "store")
    # Of transformers, which computes each at once.
    assert targets.largest_difference(store, dataset, spec, IDS) < 1e-4
