"""Answers by an engine of the run's own."""

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from data.generation.answers import answer_prompts
from data.generation.vllm import VllmGenerator
from data.sampling import Sampling
from data.target.spec import TargetSpec
from data.vllm.engine import LocalEngine
from tests.data.vllm.targets import (
    ANSWER_TOKENS,
    STOP_TOKEN_IDS,
    VOCAB_SIZE,
    capture_engine,
    expected_states,
    greedy_answers,
    make_prompts,
    save_gqa,
)

GREEDY = Sampling(ANSWER_TOKENS, STOP_TOKEN_IDS, temperature=0.0, seed=0)
SAMPLED = replace(GREEDY, temperature=1.0)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> TargetSpec:
    spec = save_gqa(tmp_path_factory.mktemp("target"))
    # What the model's own settings say must not be heard.
    own = {
        "do_sample": True,
        "temperature": 3.0,
        "top_k": 1,
        "repetition_penalty": 5.0,
        "eos_token_id": [2, 7],
    }
    (Path(spec.model) / "generation_config.json").write_text(json.dumps(own))
    return spec


@pytest.fixture(scope="module")
def engine(spec: TargetSpec, tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    root = tmp_path_factory.mktemp("engine")
    arguments = capture_engine(spec, (1, 2, 3), root, max_num_seqs=8).answer_arguments()
    return LocalEngine(arguments, root / "engine.log", concurrency=16)


@pytest.fixture(scope="module")
def writer(vllm_python: Path, spec: TargetSpec, engine: LocalEngine) -> Iterator[VllmGenerator]:
    writer = VllmGenerator([engine], expected_states(spec, (1, 2, 3)))
    yield writer
    writer.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(24)


@pytest.fixture(scope="module")
def greedy(spec: TargetSpec, prompts: list[list[int]]) -> list[list[int]]:
    return greedy_answers(spec, prompts)


def written(
    writer: VllmGenerator, prompts: list[list[int]], sampling: Sampling, output: Path
) -> list[list[int]]:
    return answer_prompts(writer, prompts, sampling, output=output, model_fingerprint="f")


def test_greedy_answers_are_those_of_transformers_and_a_bad_prompt_costs_no_other(
    writer: VllmGenerator,
    prompts: list[list[int]],
    greedy: list[list[int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with_bad = [*prompts[:5], [3, VOCAB_SIZE], *prompts[5:]]
    found = written(writer, with_bad, GREEDY, tmp_path / "a.jsonl")
    assert found == [*greedy[:5], [], *greedy[5:]]
    assert "1 of 25 prompts are refused:\n  prompt 5: Has no tokens, or others" in capsys.readouterr().err


def test_a_sampled_answer_depends_on_seed_and_index_alone(
    writer: VllmGenerator, prompts: list[list[int]], greedy: list[list[int]], tmp_path: Path
) -> None:
    whole = written(writer, prompts, SAMPLED, tmp_path / "whole.jsonl")
    assert whole != greedy
    # Half of them is there already, so that the others meet others in their batches.
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "half.jsonl").write_bytes(b"".join(lines[:1] + lines[1::2]))
    assert written(writer, prompts, SAMPLED, tmp_path / "half.jsonl") == whole
    other = written(writer, prompts, replace(SAMPLED, seed=1), tmp_path / "other.jsonl")
    assert sum(a != b for a, b in zip(whole, other, strict=True)) > len(prompts) / 2
    same = written(writer, [prompts[0]] * 4, SAMPLED, tmp_path / "same.jsonl")
    assert len({tuple(answer) for answer in same}) > 1  # the model's own top_k is 1


def test_a_killed_engine_loses_nothing_and_answers_nothing_twice(
    writer: VllmGenerator,
    engine: LocalEngine,
    prompts: list[list[int]],
    greedy: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_before: list[int] = []
    write, num_starts = writer.write, engine.num_starts

    def write_and_kill(
        prompts: list[list[int]],
        missing: list[int],
        sampling: Sampling,
        done: Callable[[Mapping[int, list[int]]], None],
    ) -> dict[int, str]:
        def done_and_kill(answers: Mapping[int, list[int]]) -> None:
            done(answers)
            if not num_before:
                num_before.append(len(answers))
                os.kill(engine.process_id, signal.SIGKILL)  # type: ignore[arg-type]

        return write(prompts, missing, sampling, done_and_kill)

    monkeypatch.setattr(writer, "write", write_and_kill)
    repeated = 20
    found = written(writer, prompts * repeated, GREEDY, tmp_path / "a.jsonl")
    assert 0 < num_before[0] < len(found)
    assert engine.num_starts == num_starts + 1
    assert found == greedy * repeated
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()[1:]]
    assert sorted(line["index"] for line in lines) == list(range(len(found)))
