"""A drafter for a cut of a real chat model, which has what targets made here lack: an attention sink.

After its upper layers the state of the first token is a hundred times as large as any other.
"""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from datasets import load_from_disk
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.store import HiddenStateStore
from data.target.parts import load_target_parts
from data.target.spec import TargetSpec
from eagle31.export.read import load_export
from eagle31.json_files import read_json, write_json
from tests.runs.forked import ROOT
from tests.runs.here import run_command
from train.config.compose import composed
from train.evaluation.parity import compare_engine
from train.evaluation.serving import DecodeJob, EngineSpec, JobResult, draft_room, run_jobs
from train.plan.sizes import RunSizes
from train.plan.work import data_summary, run_work

pytestmark = pytest.mark.timeout(1800)
NUM_LAYERS = 16
QUESTIONS = (
    "How do I boil {} eggs?",
    "Name {} animals that live in the sea.",
    "What can I do in a city in {} hours?",
    "Write a sentence of {} words about rain.",
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct without its upper layers, in bfloat16."""
    setup = subprocess.run([ROOT / "scripts/setup/smollm2"], capture_output=True, text=True)
    if setup.returncode:
        pytest.skip(f"SmolLM2 cannot be made: {setup.stderr.strip()[-500:]}")
    whole = Path(setup.stdout.strip())
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.bfloat16)
    model.model.layers = model.model.layers[:NUM_LAYERS]
    model.config.num_hidden_layers = NUM_LAYERS
    model.config.layer_types = None
    cut = tmp_path_factory.mktemp("real") / "target"
    model.save_pretrained(cut)
    AutoTokenizer.from_pretrained(whole).save_pretrained(cut)
    return cut


def settings(target: Path, directory: Path) -> list[str]:
    return [
        "recipe=any_target",
        f"target.model={target}",
        "target.dtype=bfloat16",
        f"data.train={directory / 'prompts.jsonl'}",
        "data.max_tokens=128",
        "data.num_validation=4",
        "data.num_test=4",
        "data.regenerate.max_new_tokens=24",
        "drafter.draft_vocab_size=1024",
        "train.row_tokens=256",
        "train.rows_per_step=1",
        "train.max_steps=6",
        "train.ttt_steps=3",
        "evaluate.max_new_tokens=32",
        "evaluate.decoded_prompts=4",
        "deepspeed.precision=fp32",
        f"output_dir={directory / 'run'}",
    ]


@pytest.fixture(scope="module")
def run(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    prompts = [question.format(number) for question in QUESTIONS for number in range(2, 8)]
    rows = [json.dumps({"prompt": prompt}) for prompt in prompts]
    (directory / "prompts.jsonl").write_text("\n".join(rows))
    done = run_command("train/main.py", *settings(target, directory))
    assert done.status == 0, done.err
    assert "cannot be trusted" not in done.err
    return directory / "run"


def test_the_first_tokens_state_is_captured_as_it_is(run: Path) -> None:
    [path] = run.glob("artifacts/capture-*/test")
    states = HiddenStateStore(path)[0].aux_hidden_states[:, -1].float()
    size = states.square().mean(-1).sqrt()
    assert size[0] > 100
    assert size[1:].max() < size[0] / 10


def test_the_states_take_what_the_plan_says_once_there_is_data(target: Path, run: Path) -> None:
    config = composed(settings(target, run.parent))
    work = run_work(RunSizes(config), data_summary(config))
    [stage] = run.glob("artifacts/capture-*/stage.json")
    assert work.store_bytes is not None
    planned = work.store_bytes + work.held_out_bytes
    assert planned == pytest.approx(read_json(stage)["summary"]["num_bytes"], rel=0.15)


def test_decoding_drafts_what_replay_drafts(run: Path) -> None:
    [path] = run.glob("artifacts/evaluate-*/evaluation.json")
    evaluation = read_json(path)
    decoding = evaluation["decoding"]
    assert decoding["replay"]["num_different"] == decoding["completions"]["num_different"] == 0
    assert decoding["replay"]["num_not_compared"] == 0
    assert decoding["replay"]["num_identical"] > 20
    [at_k] = [row for row in evaluation["trained"]["by_draft_length"] if row["k"] == evaluation["k"]]
    assert at_k["acceptance_length"] > 1.1, "not trained"
    assert evaluation["sampling"]["settings"] == "temperature=1"  # without a generation config
    assert evaluation["sampling"]["greedy_drafts"]["by_draft_length"][0]["num_drafts"] > 20


@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full("as the targets made here"))]
)
def test_vllm_serves_what_was_trained(
    run: Path, target: Path, vllm_python: Path, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE31_VLLM_PYTHON", str(vllm_python))
    options = ("--dtype", dtype, "--max-new-tokens", 32, "--json", tmp_path / "checked.json")
    done = run_command("scripts/check_serving", run / "export", "--target", target, *options)
    assert done.status == 0, done.out + done.err
    found = read_json(tmp_path / "checked.json")
    assert found["num_drafts"] == sum(found["drafts"].values()) > 30
    assert found["vllm"]["num_drafts"] > 20


Change = Callable[[dict, dict[str, Tensor]], None]  # of an export's config and tensors
K = 4


def other_layers(config: dict, _: dict[str, Tensor]) -> None:
    ids = [one - 1 for one in config["eagle_aux_hidden_state_layer_ids"]]
    config["eagle_aux_hidden_state_layer_ids"] = ids
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids


def no_fc_norm(config: dict, tensors: dict[str, Tensor]) -> None:
    config["fc_norm"] = False
    for name in [one for one in tensors if one.startswith("fc_norm")]:
        del tensors[name]


def state_before_the_norm(config: dict, _: dict[str, Tensor]) -> None:
    config["norm_output"] = False


def shifted_draft_vocabulary(_: dict, tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"] + 1


def other_rope(config: dict, _: dict[str, Tensor]) -> None:
    config["rope_theta"] /= 100


MISTAKES: dict[str, Change] = {
    "right": lambda config, tensors: None,
    "other layers": other_layers,
    "no fc_norm": no_fc_norm,
    "the state before the norm": state_before_the_norm,
    "a shifted draft vocabulary": shifted_draft_vocabulary,
    "another RoPE": other_rope,
    "another target": lambda config, tensors: None,
}


@pytest.mark.full("an engine for each mistake")
def test_what_vllm_must_not_do_fails_in_bfloat16(
    run: Path, target: Path, vllm_python: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(target, other)
    tensors = load_file(other / "model.safetensors")
    name = f"model.layers.{NUM_LAYERS - 1}.mlp.down_proj.weight"
    tensors[name] = tensors[name] * 1.5
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    [answers] = run.glob("artifacts/answers-*/test")
    prompts = [row["input_ids"][: row["num_prompt_tokens"]] for row in load_from_disk(str(answers))]
    jobs, trained = [], tmp_path / "trained"
    shutil.copytree(run / "export", trained)
    tensors = load_file(trained / "model.safetensors")
    # After few steps the last norm's weights are near 1: a drafter that leaves it out drafts nearly the same.
    tensors["norm.weight"] = tensors["norm.weight"] * torch.linspace(0.5, 2, len(tensors["norm.weight"]))
    save_file(tensors, trained / "model.safetensors", {"format": "pt"})
    for name, change in MISTAKES.items():
        export = tmp_path / name.replace(" ", "_")
        shutil.copytree(trained, export)
        config, tensors = read_json(export / "config.json"), load_file(export / "model.safetensors")
        change(config, tensors)
        write_json(export / "config.json", config)
        save_file(tensors, export / "model.safetensors", {"format": "pt"})
        engine = EngineSpec(
            target=TargetSpec(str(other if name == "another target" else target), dtype="bfloat16"),
            export=export,
            k=K,
            max_model_len=max(map(len, prompts)) + 64 + draft_room(K),
            max_num_seqs=len(prompts),
        )
        jobs.append(DecodeJob(name, engine, prompts, 64))
    spec = TargetSpec(str(target), dtype="float32")
    parts, loaded = load_target_parts(spec), load_export(trained, torch.device("cpu"), torch.float32)
    failures = {}
    for job, result in zip(jobs, run_jobs(jobs, vllm_python, tmp_path / "vllm.log"), strict=True):
        assert isinstance(result, JobResult), result
        compared = compare_engine(loaded, parts, spec, prompts, result.served, K, torch.bfloat16)
        failures[job.name] = compared.failures
    assert not failures.pop("right")
    assert all("drafts differ" in str(one) or "tokens" in str(one) for one in failures.values()), failures
