import multiprocessing
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from data.generation.answers import answer_prompts
from data.generation.hf import ProcessGenerator, TransformersGenerator
from data.sampling import Sampling
from data.target.loading import load_target
from tests.data.generation.generators import greedy
from tests.data.target.tiny_target import VOCAB_SIZE, save_target

MAX_NEW_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return load_target(save_target(tmp_path_factory.mktemp("target")), torch.device("cpu"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 15, (7,), generator=generator).tolist()
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def _answers(
    model: PreTrainedModel, prompts: list[list[int]], output: Path, **changes: Any
) -> list[list[int]]:
    options: dict[str, Any] = {
        "max_new_tokens": MAX_NEW_TOKENS,
        "stop_token_ids": (2, 3),
        "temperature": 0.0,
        "seed": 0,
        "batch_size": 3,
    }
    options |= changes
    generator = TransformersGenerator(model, options.pop("batch_size"))
    return answer_prompts(generator, prompts, Sampling(**options), output=output, model_fingerprint="f")


def _stop_tokens(model: PreTrainedModel, prompts: list[list[int]]) -> tuple[int, ...]:
    """Pick tokens from the middle of the model's answers, to serve as stop tokens."""
    return tuple({greedy(model, prompt, (), MAX_NEW_TOKENS)[4] for prompt in prompts[:2]})


def test_greedy_equals_an_argmax_loop(
    model: PreTrainedModel, prompts: list[list[int]], tmp_path: Path
) -> None:
    stop_token_ids = _stop_tokens(model, prompts)
    expected = [greedy(model, prompt, stop_token_ids, MAX_NEW_TOKENS) for prompt in prompts]
    assert any(answer[-1] in stop_token_ids for answer in expected)
    assert any(len(answer) == MAX_NEW_TOKENS for answer in expected)
    assert _answers(model, prompts, tmp_path / "answers.jsonl", stop_token_ids=stop_token_ids) == expected


def test_the_models_generation_config_is_not_used(
    model: PreTrainedModel, prompts: list[list[int]], tmp_path: Path
) -> None:
    sampled = _answers(model, prompts, tmp_path / "sampled.jsonl", temperature=1.0)
    original = model.generation_config
    settings = {
        "do_sample": True,
        "temperature": 3.0,
        "top_k": 1,
        "repetition_penalty": 5.0,
        "min_new_tokens": 9,
    }
    changed = type(original)(**settings)
    model.generation_config = changed
    try:
        assert _answers(model, prompts, tmp_path / "sampled2.jsonl", temperature=1.0) == sampled
        assert model.generation_config is changed
    finally:
        model.generation_config = original


def test_sampling_draws_from_the_full_distribution(
    model: PreTrainedModel, prompts: list[list[int]], tmp_path: Path
) -> None:
    many = [prompts[0]] * 400
    hot = _answers(model, many, tmp_path / "a.jsonl", temperature=100.0, max_new_tokens=1, batch_size=400)
    assert len({answer[0] for answer in hot}) > 80  # of 100; top_k=50 would allow 50


def test_sampling_from_the_likeliest_token_is_greedy(
    model: PreTrainedModel, prompts: list[list[int]], tmp_path: Path
) -> None:
    greedily = _answers(model, prompts[:3], tmp_path / "greedy.jsonl")
    for name, limit in {"top_k": 1, "top_p": 1e-6, "min_p": 1.0}.items():
        limited = {"temperature": 2.0, name: limit}
        assert _answers(model, prompts[:3], tmp_path / f"{name}.jsonl", **limited) == greedily
    with_penalty = {"temperature": 2.0, "repetition_penalty": 50.0, "top_k": 1}
    assert _answers(model, prompts[:3], tmp_path / "penalty.jsonl", **with_penalty) != greedily


def test_resume_after_a_kill_gives_the_same_answers_and_leaves_the_random_state(
    model: PreTrainedModel, prompts: list[list[int]], tmp_path: Path
) -> None:
    output = tmp_path / "answers.jsonl"
    expected = _answers(model, prompts, output, temperature=1.0)
    lines = output.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 3  # batches
    for kept in range(4):
        output.write_bytes(b"".join(lines[:kept]) + lines[kept][:7])
        torch.manual_seed(kept)
        state = torch.get_rng_state()
        assert _answers(model, prompts, output, temperature=1.0) == expected
        assert torch.equal(torch.get_rng_state(), state)
        assert output.read_bytes() == b"".join(lines)


def test_processes_give_the_answers_of_one(
    model: PreTrainedModel, prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The imports of new interpreters take longer than all else here.
    forking = multiprocessing.get_context("fork")
    monkeypatch.setattr("data.generation.hf.multiprocessing.get_context", lambda _: forking)
    spec = save_target(tmp_path / "target")
    expected = _answers(model, prompts, tmp_path / "few.jsonl", temperature=1.0)
    with closing(ProcessGenerator(spec, [torch.device("cpu")] * 2, batch_size=3)) as generator:
        sampling, output = Sampling(MAX_NEW_TOKENS, (2, 3), 1.0, seed=0), tmp_path / "all.jsonl"
        found = answer_prompts(generator, prompts, sampling, output=output, model_fingerprint="f")
    assert found == expected
