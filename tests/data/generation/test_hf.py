from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import PreTrainedModel

from data.generation.answers import answer_prompts
from data.generation.hf import ProcessGenerator, TransformersGenerator
from data.sampling import Prompts, Sampling
from data.target.loading import load_target
from eagle31.errors import UserError
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


@torch.no_grad()
def _argmax_loop(model: PreTrainedModel, prompt: list[int], eos_token_ids: tuple[int, ...]) -> list[int]:
    answer: list[int] = []
    while len(answer) < MAX_NEW_TOKENS and not (answer and answer[-1] in eos_token_ids):
        logits = model(input_ids=torch.tensor([prompt + answer])).logits
        answer.append(int(logits[0, -1].argmax()))
    return answer


def _stop_tokens(model: PreTrainedModel, prompts: list[list[int]]) -> tuple[int, ...]:
    """Pick tokens from the middle of the model's answers, to serve as stop tokens."""
    return tuple({_argmax_loop(model, prompt, ())[4] for prompt in prompts[:2]})


def test_greedy_equals_an_argmax_loop(
    model: PreTrainedModel, prompts: list[list[int]], tmp_path: Path
) -> None:
    stop_token_ids = _stop_tokens(model, prompts)
    expected = [_argmax_loop(model, prompt, stop_token_ids) for prompt in prompts]
    assert any(answer[-1] in stop_token_ids for answer in expected)
    assert any(len(answer) == MAX_NEW_TOKENS for answer in expected)
    assert _answers(model, prompts, tmp_path / "answers.jsonl", stop_token_ids=stop_token_ids) == expected


def test_the_models_generation_config_is_not_used(
    model: PreTrainedModel, prompts: list[list[int]], tmp_path: Path
) -> None:
    greedy = _answers(model, prompts, tmp_path / "greedy.jsonl")
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
        assert _answers(model, prompts, tmp_path / "greedy2.jsonl") == greedy
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kept_lines", [0, 1, 3, 6])
def test_resume_after_a_kill_gives_the_same_answers(
    model: PreTrainedModel, prompts: list[list[int]], tmp_path: Path, temperature: float, kept_lines: int
) -> None:
    output = tmp_path / "answers.jsonl"
    expected = _answers(model, prompts, output, temperature=temperature)
    lines = output.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + len(prompts)
    output.write_bytes(b"".join(lines[:kept_lines]) + lines[kept_lines][:7])
    torch.manual_seed(kept_lines)
    state = torch.get_rng_state()
    assert _answers(model, prompts, output, temperature=temperature) == expected
    assert torch.equal(torch.get_rng_state(), state)
    assert sorted(output.read_bytes().splitlines()) == sorted(line.rstrip() for line in lines)


def test_finished_answers_are_not_generated_again(
    model: PreTrainedModel, prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _answers(model, prompts, tmp_path / "answers.jsonl")
    monkeypatch.setattr(model, "generate", lambda *_, **__: pytest.fail("generated again"))
    assert _answers(model, prompts, tmp_path / "answers.jsonl") == expected


def test_seeds_differ_by_batch_and_by_seed(
    model: PreTrainedModel, prompts: list[list[int]], tmp_path: Path
) -> None:
    same = [prompts[0]] * 2
    first = _answers(model, same, tmp_path / "0.jsonl", temperature=2.0, batch_size=1)
    assert first[0] != first[1]
    assert _answers(model, same, tmp_path / "1.jsonl", temperature=2.0, batch_size=1, seed=1) != first


@pytest.mark.parametrize("limit", [{"top_k": 1}, {"top_p": 1e-6}])
def test_sampling_from_the_most_likely_token_alone_is_greedy(
    model: PreTrainedModel, prompts: list[list[int]], tmp_path: Path, limit: dict[str, Any]
) -> None:
    greedy = _answers(model, prompts, tmp_path / "greedy.jsonl")
    assert _answers(model, prompts, tmp_path / "one.jsonl", temperature=2.0, **limit) == greedy


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessGenerator]:
    spec = save_target(tmp_path_factory.mktemp("processes"))
    with closing(ProcessGenerator(spec, [torch.device("cpu")] * 2, batch_size=3)) as generator:
        yield generator


def _by_processes(
    generator: ProcessGenerator, prompts: list[list[int]], output: Path, temperature: float
) -> list[list[int]]:
    sampling = Sampling(MAX_NEW_TOKENS, (2, 3), temperature, seed=0)
    return answer_prompts(generator, prompts, sampling, output=output, model_fingerprint="f")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_processes_give_the_answers_of_one(
    model: PreTrainedModel,
    prompts: list[list[int]],
    processes: ProcessGenerator,
    tmp_path: Path,
    temperature: float,
) -> None:
    expected = _answers(model, prompts, tmp_path / "one.jsonl", temperature=temperature)
    assert _by_processes(processes, prompts, tmp_path / "two.jsonl", temperature) == expected
    # One process resumes what two began.
    lines = (tmp_path / "two.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "two.jsonl").write_bytes(b"".join(lines[:3]))
    assert _answers(model, prompts, tmp_path / "two.jsonl", temperature=temperature) == expected


def test_a_run_whose_process_is_killed_keeps_the_answers_and_resumes(
    model: PreTrainedModel, prompts: list[list[int]], tmp_path: Path
) -> None:
    spec, many = save_target(tmp_path / "target"), prompts * 4
    expected = _answers(model, many, tmp_path / "one.jsonl")
    others = set(psutil.Process().children())
    with closing(ProcessGenerator(spec, [torch.device("cpu")], batch_size=3)) as generator:

        def generate(prompts: Prompts, indices: Sequence[int], sampling: Sampling, on_answers: Any) -> Any:
            def kill_after_the_first(answers: Mapping[int, list[int]]) -> None:
                on_answers(answers)
                for process in set(psutil.Process().children()) - others:
                    process.kill()

            return generator.generate(prompts, indices, sampling, kill_after_the_first)

        killing = SimpleNamespace(engine="hf", generate=generate)
        with pytest.raises(UserError, match="A process that runs the target has died"):
            _by_processes(killing, many, tmp_path / "two.jsonl", 0.0)  # type: ignore[arg-type]
    num_kept = len((tmp_path / "two.jsonl").read_bytes().splitlines()) - 1
    assert 0 < num_kept < len(many)
    assert _answers(model, many, tmp_path / "two.jsonl") == expected


def test_processes_that_cannot_load_the_target_end_the_run(prompts: list[list[int]], tmp_path: Path) -> None:
    spec = replace(save_target(tmp_path / "target"), attn_implementation="no_such_attention")
    with (
        closing(ProcessGenerator(spec, [torch.device("cpu")], batch_size=3)) as generator,
        pytest.raises(UserError, match="A process that runs the target has died"),
    ):
        _by_processes(generator, prompts, tmp_path / "a.jsonl", 0.0)
