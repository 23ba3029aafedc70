"""The metrics and results of a finished run, as training and evaluation write them."""

import math
import random
from typing import Any


def train_metrics(
    num_steps: int = 400, every: int = 2, num_depths: int = 7, seed: int = 0
) -> list[dict[str, Any]]:
    noise = random.Random(seed)
    records = []
    for step in range(every, num_steps + 1, every):
        learned = 1 - math.exp(-3.5 * step / num_steps)
        depths = []
        for depth in range(num_depths):
            jitter = noise.gauss(0, 0.02)
            skill = learned * 0.93 ** (depth + 1) + jitter
            depths.append(
                {
                    "loss": 7.6 - 5.4 * skill + 0.2 * depth,
                    "agreement": min(max(0.68 * skill, 0), 1),
                    "expected_acceptance": min(max(0.6 * skill + 0.02, 0), 1),
                    "state_norm": 16.0,
                    "num_rows": 3000 - 90 * depth,
                }
            )
        records.append(
            {
                "kind": "train",
                "step": step,
                "loss": sum(0.8**i * d["loss"] for i, d in enumerate(depths)),
                "learning_rate": 1e-3 * (1 - step / num_steps),
                "grad_norm": 0.4,
                "tokens_per_second": 5210.0,
                "supervised_positions": 3000 * step,
                "seconds": 0.4 * step,
                "depth": depths,
            }
        )
    return records


def validation_metrics(step: int, num_steps: int = 400, max_k: int = 4) -> dict[str, Any]:
    conditional = [0.66 * (1 - math.exp(-3.5 * step / num_steps)) * 0.97**i for i in range(max_k)]
    absolute = [math.prod(conditional[: i + 1]) for i in range(max_k)]
    return {
        "kind": "validation",
        "step": step,
        "acceptance_length": {str(k): 1 + sum(absolute[:k]) for k in range(1, max_k + 1)},
        "num_drafts": 1200,
        "conditional_acceptance": conditional,
    }


def finished_metrics() -> list[dict[str, Any]]:
    records = train_metrics()
    for index, step in enumerate(range(0, 401, 40)):
        records.insert(index * 21, validation_metrics(step))
    return records


def decoding(accepted: list[int], num_drafts: int, **more: Any) -> dict[str, Any]:
    before = [num_drafts, *accepted]
    num_forwards = num_drafts + 32
    num_tokens = num_drafts + sum(accepted) + 32
    return {
        "k": len(accepted),
        "num_drafts": num_drafts,
        "accepted_per_position": accepted,
        "acceptance_length": 1 + sum(accepted) / num_drafts,
        "absolute_acceptance": [n / num_drafts for n in accepted],
        "conditional_acceptance": [n / max(m, 1) for n, m in zip(accepted, before, strict=False)],
        "tokens_per_target_forward": num_tokens / num_forwards,
        "num_tokens": num_tokens,
        "num_target_forwards": num_forwards,
        "seconds": 11.93,
        "plain_seconds": 21.47,
        "speedup": 21.47 / 11.93,
    } | more


def evaluation() -> dict[str, Any]:
    same = {"num_identical": 31, "num_near_tie": 1, "num_different": 0}
    greedy = decoding([1102, 724, 469, 305], 1704, **same)
    return {
        "k": 4,
        "engine": "eagle31 (transformers, float32, cpu)",
        "num_prompts": 32,
        "max_new_tokens": 128,
        "greedy": greedy,
        "sampling": decoding([1050, 602, 338, 190], 1890, temperature=1.0),
        "untrained": decoding([3, 0, 0, 0], 4064, **same) | {"seconds": 33.1, "speedup": 21.47 / 33.1},
        "replay": {
            key: greedy[key] for key in ("k", "num_drafts", "accepted_per_position", "acceptance_length")
        },
        "by_draft_length": [
            {"k": k, "trained": 1 + sum(greedy["absolute_acceptance"][:k]), "untrained": 1.0}
            for k in (1, 2, 3, 4)
        ]
        + [{"k": 6, "trained": 2.74, "untrained": 1.0}],
    }


def run_info() -> dict[str, Any]:
    return {
        "recipe": "quickstart",
        "target": "/home/someone/.cache/eagle31/embedded-3f2a91",
        "train_data": "embedded",
        "drafter_parameters": 1_842_944,
        "aux_layer_ids": [2, 3, 5],
        "draft_vocab_size": 4096,
        "vocab_coverage": 0.9931,
        "num_samples": 9120,
        "num_tokens": 2_214_336,
        "ttt_steps": 7,
        "steps": 400,
        "best_step": 360,
        "versions": {"torch": "2.13.0", "transformers": "5.19.0", "deepspeed": "0.19.8"},
        "git_revision": "3c9f2e1d7a",
        "stages": [
            {"name": "prepare", "seconds": 19.4, "reused": False},
            {"name": "capture", "seconds": 41.8, "reused": True},
            {"name": "train", "seconds": 171.3, "reused": False},
            {"name": "export", "seconds": 0.6, "reused": False},
            {"name": "evaluate", "seconds": 88.0, "reused": False},
        ],
        "export": "/home/someone/runs/quickstart/export",
    }
