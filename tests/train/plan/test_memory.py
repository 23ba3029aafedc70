"""The plan's memory model compared with measured peaks of real training steps, in a separate process."""

import json
from typing import Any

import pytest

from eagle31.cost.flops import StepCounts
from eagle31.model.config import DrafterConfig
from tests.runs.forked import run
from train.plan.memory import TrainerSettings, trainer_memory

TOLERANCE = 0.15
GQA: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 12288,
    "draft_vocab_size": 4096,
    "target_hidden_size": 384,
    "aux_layer_ids": [2, 8, 13],
}
MLA = GQA | {
    "num_key_value_heads": 6,
    "head_dim": 96,
    "draft_vocab_size": 12288,
    "mla": {
        "q_lora_rank": 192,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
    },
}
SETTINGS: dict[str, Any] = {
    "zero_stage": 0,
    "bf16": False,
    "offload_optimizer": False,
    "train_lm_head": True,
    "rollout_chunk": None,
    "draft_tokens": 4,
    "row_tokens": 640,
    "rows_per_step": 2,
    "world_size": 1,
}


LONG = (8192, 32_768)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "every token supervised": (GQA, {}, 0),
    "a long prompt": (GQA, {"row_tokens": 1536}, 1280),
    **{
        f"{tokens} tokens in chunks": (
            GQA,
            {"rollout_chunk": 256, "row_tokens": tokens, "rows_per_step": 1},
            0,
        )
        for tokens in (2048, 8192)
    },
    **{
        f"{name}, the end of {tokens} tokens": (
            config,
            {"rollout_chunk": 256, "row_tokens": tokens, "rows_per_step": 1},
            tokens - 1024,
        )
        for name, config in (("GQA", GQA), ("MLA", MLA))
        for tokens in LONG
    },
    "MLA in chunks": (MLA, {"rollout_chunk": 128, "row_tokens": 4096, "zero_stage": 2}, 0),
    "frozen head, ZeRO 2": (GQA, {"train_lm_head": False, "zero_stage": 2}, 0),
    "MLA, full vocabulary, Muon, ZeRO 1": (MLA, {"muon": True, "zero_stage": 1}, 0),
    "Muon": (GQA, {"muon": True, "row_tokens": 32}, 0),
    "Muon, MLA, ZeRO 2": (MLA, {"muon": True, "zero_stage": 2, "row_tokens": 32}, 0),
    "bf16, ZeRO 1": (GQA, {"bf16": True, "zero_stage": 1, "row_tokens": 128}, 0),
}


# Measured in every run; the others with `--full`.
CORE = ("a long prompt", "Muon, MLA, ZeRO 2")


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> dict[str, Any]:
    names = list(CASES) if request.config.getoption("--full") else CORE
    specs = [
        {"config": config, "settings": SETTINGS | settings, "num_steps": 3, "prompt_tokens": prompt_tokens}
        for config, settings, prompt_tokens in map(CASES.__getitem__, names)
    ]
    # On a processor with bf16 instructions, oneDNN keeps repacked copies of bf16 weights.
    variables = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    worker = "tests/train/plan/memory_worker.py"
    printed = run(worker, json.dumps(specs), variables=variables, torchrun=False)
    lines = [line for line in printed.splitlines() if line.startswith('{"peak"')]
    return dict(zip(names, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_planned_memory_equals_measured_memory(case: str, measured: dict[str, Any]) -> None:
    if case not in measured:
        pytest.skip("runs with --full")
    found = measured[case]
    assert found["planned"] == pytest.approx(found["peak"], rel=TOLERANCE), found["memory"]
    validation = pytest.approx(found["validation"], rel=TOLERANCE, abs=2**22)  # what kernels allocate
    assert found["memory"]["validation"] == validation


@pytest.mark.parametrize(
    ("changes", "copies"),
    [
        ({}, 2),
        ({"zero_stage": 1, "bf16": True}, 3),
        ({"zero_stage": 2, "world_size": 8}, 3 / 8),
        ({"zero_stage": 1, "offload_optimizer": True}, 0),
    ],
)
def test_the_optimizer_has_two_moments_and_with_zero_the_float32_weights(
    changes: dict[str, Any], copies: float
) -> None:
    settings, counts = TrainerSettings(**SETTINGS | changes), StepCounts(8, (8,), 0, 8)
    memory = trainer_memory(DrafterConfig(**GQA), {"weight": (64, 32)}, settings, counts, "cuda")
    assert memory.optimizer == copies * 64 * 32 * 4


@pytest.mark.full("rows of 32,768 tokens")
@pytest.mark.parametrize("name", ["GQA", "MLA"])
def test_memory_grows_with_a_row_as_planned(name: str, measured: dict[str, Any]) -> None:
    short, long = (measured[f"{name}, the end of {tokens} tokens"] for tokens in LONG)
    grown, planned = long["peak"] - short["peak"], long["planned"] - short["planned"]
    assert planned == pytest.approx(grown, rel=0.1)
