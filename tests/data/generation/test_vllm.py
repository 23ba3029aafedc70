"""Answers from a vLLM server that only writes completions."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data.capture.vllm.client import VllmClient
from data.generation.answers import answer_prompts
from data.generation.vllm import VllmGenerator
from data.sampling import Sampling
from tests.data.capture.vllm.servers import INFO
from tests.data.capture.vllm.targets import (
    ANSWER_TOKENS,
    STOP_TOKEN_IDS,
)

GREEDY = Sampling(ANSWER_TOKENS, STOP_TOKEN_IDS, temperature=0.0, seed=0)
SAMPLED = replace(GREEDY, temperature=1.0)
RECOMMENDED = replace(SAMPLED, top_k=20, top_p=0.9, min_p=0.1, repetition_penalty=1.1)


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The requests to servers, which a stand-in answers at once."""
    found: list[dict[str, Any]] = []

    async def answered(_: VllmClient, method: str, path: str, body: Any = None, seconds: float = 0) -> dict:
        if method == "GET":
            return INFO.to_json()
        found.append(body)
        return {"choices": [{"finish_reason": "stop", "token_ids": [2]}]}

    monkeypatch.setattr(VllmClient, "_request", answered)
    return found


def test_a_request_leaves_nothing_to_the_models_settings(tmp_path: Path, bodies: list[dict]) -> None:
    asked: dict[str, dict[int, dict[str, Any]]] = {}
    for name, sampling, prompts in (
        ("first", SAMPLED, [[1], [3], [5]]),
        ("alone", SAMPLED, [[1]]),
        ("other seed", replace(SAMPLED, seed=1), [[1]]),
        ("greedy", GREEDY, [[1]]),
        ("recommended", RECOMMENDED, [[1]]),
    ):
        generator = VllmGenerator([VllmClient("http://nowhere", 4)], lambda *_: None)
        answer_prompts(generator, prompts, sampling, output=tmp_path / f"{name}.jsonl", model_fingerprint="f")
        generator.close()
        asked[name] = {body["prompt"][0]: body for body in bodies}
        bodies.clear()
    fields: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    fields |= {"ignore_eos": True, "stop_token_ids": list(STOP_TOKEN_IDS), "max_tokens": ANSWER_TOKENS}
    assert fields.items() <= asked["first"][1].items()
    assert len({body["seed"] for body in asked["first"].values()}) == 3
    assert asked["alone"][1] == asked["first"][1]
    assert asked["other seed"][1]["seed"] != asked["first"][1]["seed"]
    assert asked["greedy"][1]["temperature"] == 0.0
    fields |= {"top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1}
    assert fields.items() <= asked["recommended"][1].items()


@pytest.mark.usefixtures("bodies")
def test_a_slow_disk_delays_no_prompt_for_which_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_writes = 0

    def sync(_: int) -> None:
        nonlocal num_writes
        num_writes += 1
        time.sleep(0.02)

    monkeypatch.setattr("os.fsync", sync)
    generator = VllmGenerator([VllmClient("http://nowhere", 200)], lambda *_: None)
    answer_prompts(generator, [[1]] * 1000, GREEDY, output=tmp_path / "a.jsonl", model_fingerprint="f")
    generator.close()
    assert num_writes < 1000 / 25
