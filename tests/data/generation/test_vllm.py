"""Answers from a vLLM server that only writes completions."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from data.capture.vllm.client import VllmClient
from data.capture.vllm.server_process import ServerProcess
from data.generation.answers import answer_prompts
from data.generation.vllm import VllmGenerator
from data.sampling import Sampling
from data.target.spec import TargetSpec
from eagle31.errors import UserError
from tests.data.capture.vllm.client_process import KEY
from tests.data.capture.vllm.targets import (
    ANSWER_TOKENS,
    START_SECONDS,
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
    # The model's generation config must not be used.
    generation_config = {
        "do_sample": True,
        "temperature": 3.0,
        "top_k": 1,
        "repetition_penalty": 5.0,
        "eos_token_id": [2, 7],
    }
    (Path(spec.model) / "generation_config.json").write_text(json.dumps(generation_config))
    return spec


@pytest.fixture(scope="module")
def server(
    vllm_python: Path, spec: TargetSpec, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("server")
    server = ServerProcess(
        capture_engine(spec, (1, 2, 3), root, max_num_seqs=8).answer_command_line(),
        host="127.0.0.1",
        port=None,
        key=KEY,
        devices=None,
        log=root / "server.log",
        limit_seconds=START_SECONDS,
    )
    server.wait_until_ready(progress=False)
    yield server
    server.close()


@pytest.fixture(scope="module")
def generator(spec: TargetSpec, server: ServerProcess) -> Iterator[VllmGenerator]:
    client = VllmClient(server.url, 16, KEY, server.check)
    generator = VllmGenerator([client], expected_states(spec, (1, 2, 3)))
    yield generator
    generator.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(24)


@pytest.fixture(scope="module")
def greedy(spec: TargetSpec, prompts: list[list[int]]) -> list[list[int]]:
    return greedy_answers(spec, prompts)


def generate_answers(
    generator: VllmGenerator, prompts: list[list[int]], sampling: Sampling, output: Path
) -> list[list[int]]:
    return answer_prompts(generator, prompts, sampling, output=output, model_fingerprint="f")


def test_greedy_answers_equal_those_of_transformers_next_to_a_refused_prompt(
    generator: VllmGenerator,
    prompts: list[list[int]],
    greedy: list[list[int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with_bad = [*prompts[:5], [3, VOCAB_SIZE], *prompts[5:]]
    found = generate_answers(generator, with_bad, GREEDY, tmp_path / "a.jsonl")
    assert found == [*greedy[:5], [], *greedy[5:]]
    assert "1 of 25 were refused:\n  prompt 5: It has no tokens, or one outside" in capsys.readouterr().err


def test_a_sampled_answer_depends_only_on_seed_and_index(
    generator: VllmGenerator, prompts: list[list[int]], greedy: list[list[int]], tmp_path: Path
) -> None:
    whole = generate_answers(generator, prompts, SAMPLED, tmp_path / "whole.jsonl")
    assert whole != greedy
    # Alone, a prompt shares its batches with no other. The longest is the first.
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    alone = generate_answers(generator, [prompts[longest]], SAMPLED, tmp_path / "alone.jsonl")
    assert alone == [whole[longest]]
    other = generate_answers(generator, prompts, replace(SAMPLED, seed=1), tmp_path / "other.jsonl")
    assert sum(a != b for a, b in zip(whole, other, strict=True)) > len(prompts) / 2
    same = generate_answers(generator, [prompts[0]] * 4, SAMPLED, tmp_path / "same.jsonl")
    assert len({tuple(answer) for answer in same}) > 1  # the model's top_k is 1


def test_conversations_continue_as_soon_as_they_are_answered(
    generator: VllmGenerator, prompts: list[list[int]], spec: TargetSpec
) -> None:
    """Each next prompt is the first one, its completion and another token; the numbers of turns differ."""
    num_turns = [1 + index % 3 for index in range(8)]
    asked = {index: [prompts[index]] for index in range(8)}
    answers: dict[int, list[list[int]]] = {index: [] for index in range(8)}
    handed_over: list[tuple[int, list[int]]] = []

    def next_prompt(index: int, ids: list[int]) -> list[int] | None:
        answers[index].append(ids)
        if len(answers[index]) == num_turns[index]:
            return None
        asked[index].append([*asked[index][-1], *ids, 3])
        return asked[index][-1]

    refused = generator.converse(
        {index: prompts[index] for index in range(8)},
        GREEDY,
        handed_over.extend,
        next_prompt,
        seed=lambda index: (0, index, len(answers[index])),
    )
    assert refused == {}
    assert [len(answers[index]) for index in range(8)] == num_turns
    assert sorted(handed_over) == sorted((index, ids) for index in range(8) for ids in answers[index])
    flat = [(prompt, ids) for i in range(8) for prompt, ids in zip(asked[i], answers[i], strict=True)]
    assert [ids for _, ids in flat] == greedy_answers(spec, [prompt for prompt, _ in flat])

    def failing(index: int, ids: list[int]) -> list[int] | None:
        raise UserError("data.train", index, "The template refuses.")

    with pytest.raises(UserError, match="The template refuses"):
        generator.converse({0: prompts[0]}, GREEDY, handed_over.extend, failing, seed=lambda index: (index,))
