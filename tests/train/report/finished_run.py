"""The metrics and results of a finished run, as training and evaluation write them."""

import math
import random
from typing import Any

from eagle31.decoding.acceptance import AcceptanceStats
from train.evaluation.replay import PromptAcceptance


def train_metrics(num_steps: int = 400, every: int = 2) -> list[dict[str, Any]]:
    records = []
    for step in range(every, num_steps + 1, every):
        learned = 1 - math.exp(-3.5 * step / num_steps)
        depths = [{"loss": 7.6 - 5.4 * learned * 0.93**depth + 0.2 * depth} for depth in range(7)]
        records.append({"kind": "train", "step": step, "seconds": 0.4 * step, "depth": depths})
    return records


def validation_metrics(step: int) -> dict[str, Any]:
    rate = 0.66 * (1 - math.exp(-3.5 * step / 400))
    lengths = {str(k): sum(rate**i for i in range(k + 1)) for k in range(1, 5)}
    return {"kind": "validation", "step": step, "acceptance_length": lengths}


def drift_metrics(step: int) -> dict[str, Any]:
    """A record of a drafter whose attention moves to its own tokens and whose state grows."""
    depth = []
    for index in range(8):
        own = 0.09 * index
        layer = {"sink": 0.6 * (1 - own), "own": own, "context": 0.4 * (1 - own)}
        depth.append({"layers": [layer], "state_rms": 1.5**index * (1 + step / 400)})
    return {"kind": "drift", "step": step, "num_positions": 64, "depth": depth}


def finished_metrics() -> list[dict[str, Any]]:
    records = train_metrics()
    for index, step in enumerate(range(0, 401, 40)):
        records.insert(index * 21, validation_metrics(step))
    return records


def statistics(accepted: list[int], num_drafts: int, **more: Any) -> dict[str, Any]:
    found = AcceptanceStats(len(accepted), num_drafts, tuple(accepted)).to_json()
    return found | {"accepted_per_position": accepted} | more  # a list, as in a file


def by_draft_length(accepted: list[int], num_drafts: int) -> dict[str, Any]:
    """Return statistics with as many accepted at each position for drafts of any length."""
    rows = []
    for k in range(1, len(accepted) + 1):
        row = statistics(accepted[:k], num_drafts)
        length = row["acceptance_length"]
        rows.append(row | {"low": length - 0.11, "high": length + 0.12})
    return {"by_draft_length": rows, "by_prompt": {"drafts": [[num_drafts]] * 8, "accepted": [[0]] * 8}}


def serving(export: str) -> dict[str, Any]:
    """Return serving.json of an export's directory."""
    row = {"k": 4, "plain": 41.5, "drafter": 74.7, "acceptance_length": 2.5}
    return {
        "engine": "vLLM 0.32.0",
        "device": "a CPU",
        "dtype": "float32",
        "max_new_tokens": 64,
        "export": export,
        "rows": [
            row | {"concurrency": 1, "speedup": {"value": 1.8, "low": 1.62, "high": 1.97}},
            row | {"concurrency": 8, "speedup": {"value": 0.9, "low": 0.81, "high": 0.98}},
        ],
    }


def evaluation() -> dict[str, Any]:
    same = {"num_identical": 7, "num_near_tie": 1, "num_different": 0}
    greedy = [1102, 724, 469, 305, 198, 129, 84, 55]
    return {
        "k": 4,
        "engine": "eagle31 (transformers, float32, cpu)",
        "states": "exact states (float32) of capture.source=hf",
        "num_prompts": 32,
        "max_new_tokens": 128,
        "trained": by_draft_length(greedy, 1704),
        "untrained": by_draft_length([3, 0, 0, 0, 0, 0, 0, 0], 4064),
        "sampling": {
            "temperature": 1.0,
            "settings": "temperature=1",
            "num_prompts": 32,
            "greedy_drafts": by_draft_length([850, 402, 238, 110, 60, 30, 15, 7], 1890),
            "sampled_drafts": by_draft_length([1050, 602, 338, 190, 100, 60, 30, 15], 1890),
        },
        "decoding": statistics(
            [280, 180, 120, 75],
            426,
            num_prompts=8,
            num_tokens=1089,
            completions=same,
            replay=same,
        ),
    }


def run_info() -> dict[str, Any]:
    return {
        "recipe": "quickstart",
        "target_fingerprint": "files:f00d",
        "target": "/home/someone/.cache/eagle31/embedded-3f2a91",
        "architecture": "LlamaForCausalLM",
        "train_data": ["embedded"],
        "template_kwargs": {},
        "drafter_parameters": 1_842_944,
        "aux_layer_ids": [2, 3, 5],
        "draft_vocab_size": 4096,
        "vocab_coverage": 0.9931,
        "num_samples": 9120,
        "num_tokens": 2_214_336,
        "ttt_steps": 7,
        "layout": "vllm",
        "method": "eagle3",
        "device": "cuda",
        "steps": 400,
        "best_step": 360,
        "versions": {"torch": "2.13.0", "transformers": "5.19.0", "deepspeed": "0.19.8"},
        "git_revision": "3c9f2e1d7a",
        "stages": [
            {"name": "prepare", "seconds": 19.4},
            {"name": "capture", "seconds": 41.8},
            {"name": "train", "seconds": 171.3},
            {"name": "export", "seconds": 0.6},
            {"name": "evaluate", "seconds": 88.0},
        ],
        "export": "/home/someone/runs/quickstart/export",
    }


def acceptance(rate: float, *, texts: str = "same", num_prompts: int = 24) -> dict[str, Any]:
    """Return `trained` of an evaluation whose draft tokens are accepted with a probability.

    Drafts meet the same luck at every rate, as drafts of the same text do.
    """
    by_prompt = []
    for prompt in range(num_prompts):
        luck = random.Random(f"0 {prompt}")
        hardness = luck.uniform(0.85, 1.0)
        draws = [[luck.random() for _ in range(8)] for _ in range(40)]
        hits = [next((i for i, one in enumerate(row) if one > rate * hardness), 8) for row in draws]
        by_prompt.append(
            tuple(AcceptanceStats.from_lengths(k, [min(hit, k) for hit in hits]) for k in range(1, 9))
        )
    return PromptAcceptance(tuple(by_prompt), texts_hash=texts).to_json()
