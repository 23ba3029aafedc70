"""A real vLLM server on the CPU, from start to kill -9."""

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread

import httpx
import psutil
import pytest
import torch
from datasets import Dataset

from data.capture.transport.protocol import StateRequest
from data.capture.transport.spool import Spool, open_spool
from data.capture.vllm.capture_request import PARAMS, capture_params
from data.capture.vllm.client import VllmClient
from data.capture.vllm.server_info import INFO_PATH
from data.generation.answers import answer_prompts
from data.generation.vllm import VllmGenerator
from data.sampling import Sampling
from data.store import HiddenStateStore
from data.store.shards import FinishedShards
from data.target.head import TargetHead
from data.target.parts import load_target_parts
from data.target.spec import TargetSpec
from eagle31.errors import UserError
from eagle31.json_files import read_json
from tests.data.capture.vllm.capturing import (
    CODEC,
    KEY,
    STALL_SECONDS,
    capture_store,
    capture_until_preempted,
    counter,
    server_process,
)
from tests.data.capture.vllm.server_run import SMALL
from tests.data.capture.vllm.targets import (
    ANSWER_TOKENS,
    MAX_TOKENS,
    NEAR_TIE,
    STOP_TOKEN_IDS,
    VOCAB_SIZE,
    capture_engine,
    captured_target,
    greedy_answers,
    largest_difference,
    largest_shortfall,
    make_hostile_directory,
    make_prompts,
    make_samples,
    save_gqa,
    save_hybrid,
)
from tests.processes import EVERY_ADDRESS, command_of, listening, wait_for
from tests.runs.model_runner import model_runner
from train.engines.probe import check_servers, probe_states

IDS = (0, 1, 2, 3, 4)
NUM_SAMPLES = 120
NOBODY = "127.0.0.1:9"  # the discard port


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm_server")


@pytest.fixture(scope="module")
def spec(root: Path) -> TargetSpec:
    return save_hybrid(root / "target")


@dataclass(frozen=True)
class Server:
    """A server that another process has started."""

    url: str
    process_id: int  # the process that starts it again

    def vllm_process(self) -> psutil.Process:
        """Return the process that answers requests."""
        [process] = psutil.Process(self.process_id).children()
        return process


@pytest.fixture(scope="module")
def server(vllm_python: Path, spec: TargetSpec, root: Path) -> Iterator[Server]:
    """A server that prefills in chunks, with prefix caching and a cache for two of the longest prompts.

    The user's modules have our names: neither the working directory nor PYTHONPATH may matter.
    """
    hostile = make_hostile_directory(root / "hostile")
    script = Path(__file__).with_name("server_run.py")
    run = psutil.Popen(
        [sys.executable, str(script), spec.model, str(root), json.dumps(IDS)],
        cwd=hostile,
        env=os.environ | {"PYTHONPATH": str(hostile)},
    )
    ready = root / "server.json"
    processes = [run]
    try:
        wait_for(lambda: ready.exists() or run.poll() is not None)
        server = Server(**read_json(ready))
        processes += run.children(recursive=True)
        assert KEY not in " ".join(str(process.cmdline()) for process in processes)
        assert {address for address, _ in listening(server.vllm_process())} == {"127.0.0.1"}
        assert not EVERY_ADDRESS & {address for process in processes for address, _ in listening(process)}
        yield server
        processes = [run, *run.children(recursive=True)]
        assert len(processes) >= 4
        run.kill()
        run.wait()
        # All processes of a server end with the run that started it.
        wait_for(lambda: not any(map(is_alive, processes)))
        assert KEY not in (root / "server.log").read_text()
    finally:
        for process in filter(is_alive, processes):
            process.kill()


def client(server: Server, concurrency: int) -> VllmClient:
    return VllmClient(server.url, concurrency, KEY, answer_seconds=STALL_SECONDS)


def capture(server: Server, dataset: Dataset, directory: Path, spec: TargetSpec, **changes: object) -> None:
    target = replace(captured_target(spec, IDS), **changes)  # type: ignore[arg-type]
    capture_store(client(server, 8), dataset, directory, target, directory.parent)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_servers_that_are_set_up_differently_are_refused(
    server: Server, spec: TargetSpec, root: Path
) -> None:
    dataset, target = make_samples(4), captured_target(spec, IDS)
    parts = target.parts
    cases: dict[str, dict[str, object]] = {
        r"aux layer ids are \[0, 1, 2, 3, 4\], not \[0, 2\]": {"aux_layer_ids": (0, 2)},
        "dtype is float32, not bfloat16": {
            "parts": replace(parts, embed_tokens=parts.embed_tokens.bfloat16())
        },
        "or it has other weights": {"parts": replace(parts, fingerprint="another")},
    }
    for number, (message, other) in enumerate(cases.items()):
        with pytest.raises(UserError, match=message):
            capture(server, dataset, root / f"refused-{number}", spec, **other)
    num_tokens = MAX_TOKENS + 1
    too_long = Dataset.from_dict({"input_ids": [[1] * num_tokens], "loss_mask": [[True] * num_tokens]})
    with pytest.raises(UserError, match=f"{MAX_TOKENS} tokens where a sample has {num_tokens}"):
        capture(server, too_long, root / "refused-long", spec)
    nobody = VllmClient(f"http://{NOBODY}", 1)
    with pytest.raises(UserError, match=r"None has answered .*No server answers at this address"):
        capture_store(nobody, dataset, root / "refused-down", target, root, patience_seconds=1.0)


def test_a_server_whose_probabilities_are_not_those_of_the_head_is_refused(
    server: Server, spec: TargetSpec, root: Path
) -> None:
    head = load_target_parts(spec).head
    with open_spool(root, "probed", CODEC, 1_000_000) as spool:

        def probe(head: TargetHead) -> None:
            states = partial(probe_states, spool=spool, key="probed-0", head=head)
            check_servers([client(server, 1)], lambda *_: None, states)

        probe(head)
        with pytest.raises(UserError, match="not the states that its head reads"):
            probe(TargetHead(head.norm, head.lm_head, scale=1 / 8))


def test_a_server_that_captures_writes_answers_too_and_keeps_no_states_of_them(
    server: Server, spec: TargetSpec, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = make_prompts(24)
    greedy = Sampling(ANSWER_TOKENS, STOP_TOKEN_IDS, temperature=0.0, seed=0)
    before = sorted(root.rglob("*.safetensors"))
    writer = VllmGenerator([client(server, 8)], lambda *_: None)
    with_bad = [*prompts[:5], [3, VOCAB_SIZE], *prompts[5:]]
    answers = answer_prompts(writer, with_bad, greedy, output=root / "a.jsonl", model_fingerprint="f")
    assert "1 of 25 were refused:\n  prompt 5: It has no tokens, or one outside" in capsys.readouterr().err
    assert answers.pop(5) == []
    writer.close()
    assert answers == greedy_answers(spec, prompts)
    assert sorted(root.rglob("*.safetensors")) == before
    # Prefix caching gives the states that were kept while the answer was written.
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    dataset = Dataset.from_dict({"input_ids": rows, "loss_mask": [[True] * len(row) for row in rows]})
    capture(server, dataset, root / "answered", spec)
    assert largest_difference(HiddenStateStore(root / "answered"), dataset, spec, IDS) < 1e-5


def test_states_of_preempted_prompts_are_exact(server: Server, spec: TargetSpec, root: Path) -> None:
    answers = capture_while_answering(server, spec, root, num_samples=30, num_prompts=24, num_tokens=60)
    # Drafts of the tokens that were just written have been accepted, and have changed nothing (vllm#56417).
    assert any(one == other for answer in answers for one, other in itertools.pairwise(answer))


@pytest.mark.full("it starts vLLM again, whose kernels are interpreted")
def test_states_are_exact_on_the_model_runner_of_gpus(
    vllm_python: Path, spec: TargetSpec, tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    smaller = SMALL | {"num_gpu_blocks_override": 20, "max_num_batched_tokens": 32}
    with model_runner("V2", vllm_python, tmp_path / "v2"):
        engine = capture_engine(spec, IDS, tmp_path, **smaller)
        process = server_process(engine.command_line(), log, STALL_SECONDS)
    with contextlib.closing(process):
        process.wait_until_ready(progress=False)
        server = Server(process.url, process.process_id)
        capture_while_answering(server, spec, tmp_path, num_samples=4, num_prompts=8, num_tokens=20)
    assert "Using V2 Model Runner" in log.read_text()


def capture_while_answering(
    server: Server, spec: TargetSpec, root: Path, *, num_samples: int, num_prompts: int, num_tokens: int
) -> list[list[int]]:
    """Check the states and completions of prompts that vLLM preempts.

    In the end two prompts have a block of the cache in common.
    """
    dataset, target = make_samples(num_samples, seed=1), captured_target(spec, IDS)
    prompts = [prompt[:60] for prompt in make_prompts(num_prompts) if len(prompt) >= 60]
    attempts = capture_until_preempted(server.url, dataset, prompts, num_tokens, target, root)
    for states, answers in attempts:
        assert largest_difference(states, dataset, spec, IDS) < 1e-5
        assert largest_shortfall(spec, prompts, answers) < NEAR_TIE
    num_hits = counter(server.url, "prefix_cache_hits")
    same = [[1] * MAX_TOKENS, [1] * (MAX_TOKENS - 1) + [2]]
    twins = Dataset.from_dict({"input_ids": same, "loss_mask": [[True] * MAX_TOKENS] * 2})
    capture(server, twins, root / "twins", spec)
    assert largest_difference(HiddenStateStore(root / "twins"), twins, spec, IDS) < 1e-5
    assert counter(server.url, "prefix_cache_hits") > num_hits
    return answers


def test_a_server_lets_only_requests_with_its_key_in_and_only_those_of_a_run(
    server: Server, spec: TargetSpec, root: Path
) -> None:
    body = {"model": spec.model, "prompt": [1, 2, 3], "max_tokens": 1}
    # vLLM takes such requests at these paths, too, and its own key does not protect the second one.
    others = ["/inference/v1/generate", "/invocations", "/v1/chat/completions", "/tokenize", "/docs"]
    entries = {None: 401, "another": 401, KEY: 404}
    for key, status in entries.items():
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        for path in others:
            assert httpx.post(server.url + path, json=body, headers=headers).status_code == status
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
        assert answer.status_code == (200 if key == KEY else 401)
    info = httpx.get(server.url + INFO_PATH, headers={"Authorization": f"Bearer {KEY}"}).json()
    assert (info["model"], info["aux_layer_ids"], info["max_tokens"]) == (spec.model, list(IDS), MAX_TOKENS)
    assert info["cache_tokens"] >= MAX_TOKENS
    assert httpx.get(f"{server.url}/health").status_code == 200
    stranger = VllmClient(server.url, 8, "the-key-of-another")
    with pytest.raises(UserError, match="demands another key; set VLLM_API_KEY") as caught:
        capture_store(stranger, make_samples(2), root / "stranger", captured_target(spec, IDS), root)
    assert "the-key-of" not in str(caught.value)


def test_what_a_request_asks_for_fails_for_its_client_only(
    server: Server, spec: TargetSpec, root: Path
) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}

    def ask(params: object) -> dict:
        body = {"model": spec.model, "prompt": [1, 2, 3], "max_tokens": 1, "kv_transfer_params": params}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=None)
        assert answer.status_code == 200
        return answer.json()["kv_transfer_params"][PARAMS]

    process = server.vllm_process()
    request = StateRequest("7", torch.tensor([1, 2, 3]), torch.ones(3, dtype=torch.bool))
    good = capture_params(Spool(root, CODEC), request)[PARAMS]
    spool = good["destination"]
    refusals: dict[str, object] = {
        "codec must be one of": {"destination": spool | {"codec": "int4"}},
        "letters, digits": {"key": "../../7"},
        "is not below": {"destination": spool | {"spool": f"{root}/../elsewhere"}},
        "does not exist": {"destination": spool | {"spool": f"{root}/nowhere"}},
        "has the fields": {"destination": spool | {"more": 1}},
        "ascending": {"loss_spans": [[0, 10**9]]},
    }
    for reason, change in refusals.items():
        assert reason in ask({PARAMS: good | change})["error"]  # type: ignore[operator]
    for nonsense in ("eagle31", 3, [1], {"destination": "here"}):
        assert "no request for hidden states" in ask({PARAMS: nonsense})["error"]
    # What fails after the answer is in the log, and the next requests are served.
    (root / "7.safetensors").mkdir()
    assert ask({PARAMS: good}) == {}
    wait_for(lambda: "eagle31: 7 was not delivered: IsADirectoryError" in (root / "server.log").read_text())
    (root / "7.safetensors").rmdir()
    assert ask({PARAMS: good}) == {}
    wait_for((root / "7.safetensors").exists)
    assert server.vllm_process() == process


@pytest.mark.full("it starts vLLM again")
def test_an_8_bit_cache_leaves_the_hidden_states_exact(vllm_python: Path, tmp_path: Path) -> None:
    """A checkpoint's quantization_config sets the same argument."""
    spec, dataset, ids = save_gqa(tmp_path / "target"), make_samples(20), (0, 1, 4)
    engine = capture_engine(spec, ids, tmp_path, kv_cache_dtype="fp8")
    process = server_process(engine.command_line(), tmp_path / "server.log", STALL_SECONDS)
    with contextlib.closing(process):
        process.wait_until_ready(progress=False)
        connected = VllmClient(process.url, 8, KEY, process.check, STALL_SECONDS)
        capture_store(connected, dataset, tmp_path / "store", captured_target(spec, ids), tmp_path)
    store = HiddenStateStore(tmp_path / "store")
    embedding = load_target_parts(spec).embed_tokens
    for sample in store.get_many(range(len(store))):
        read = sample.aux_hidden_states[:-2, 0]  # no draft reads the others
        assert torch.equal(read, embedding[sample.input_ids[:-2]])
    # The keys and values of a random target have three bits each.
    assert 1e-4 < largest_difference(store, dataset, spec, ids) < 0.5


@pytest.mark.full("it starts two engines, twice")
def test_the_engines_of_one_server_share_a_capture(
    vllm_python: Path,
    spec: TargetSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two data-parallel engines; one of them is killed on the way."""
    monkeypatch.setenv("EAGLE31_VLLM_PYTHON", str(vllm_python))  # it looks for an engine among its children
    two: dict[str, object] = {"data_parallel_size": 2, "distributed_executor_backend": "uni"}
    engine = capture_engine(spec, IDS, tmp_path, **two)
    process = server_process(engine.command_line(), tmp_path / "server.log", STALL_SECONDS)
    connected = VllmClient(process.url, 8, KEY, process.check, STALL_SECONDS)
    dataset, store = make_samples(NUM_SAMPLES), tmp_path / "store"

    def kill_an_engine_midway() -> None:
        wait_for(lambda: store.exists() and len(FinishedShards(store).records()) >= 2)
        children = psutil.Process().children(recursive=True)
        [engine] = [child for child in children if "EngineCore_DP1" in " ".join(command_of(child))]
        engine.kill()

    with contextlib.closing(process):
        process.wait_until_ready(progress=False)
        killer = Thread(target=kill_an_engine_midway)
        killer.start()
        capture_store(connected, dataset, store, captured_target(spec, IDS), tmp_path)
        killer.join()
        assert process.num_starts == 2
    finished = HiddenStateStore(store)
    assert len(finished) == NUM_SAMPLES
    assert largest_difference(finished, dataset, spec, IDS) < 1e-5
