"""Readers of what a run leaves for the next one: results, records, answers, and saved data sets."""

import json
from pathlib import Path

import pyarrow as pa
from datasets import Dataset, disable_progress_bars

from data.file_hashes import _remembered
from data.generation.answers import AnswerFile, answer_line
from data.generation.regenerate import _finish_block, _finished
from data.rendering.tokenize import SAMPLE_SCHEMA
from data.sampling import Sampling
from data.text.saved import load_saved
from data.text.sources import read_conversations
from eagle31.json_files import (
    append_jsonl,
    read_json,
    read_jsonl,
    read_sealed_json,
    write_json,
    write_sealed_json,
)
from tests.fuzz.reader import Reader, readers_of
from train.artifact import Artifact
from train.distributed import World
from train.reporting.draft_length import read_step_times
from train.reporting.results import read_report, read_serving
from train.trainer.checkpoints import BEST, CheckpointDirectory
from train.trainer.continuation import BEGUN, begun_trainings, find_earlier

INPUTS = {"fixed": {"a": 1, "zero_stage": 2}, "steps": 3}
SAMPLING = Sampling(max_new_tokens=4, stop_token_ids=(1,), temperature=0.0, seed=0)


def result_readers(directory: Path) -> dict[str, Reader]:
    """Return the readers of results that are shown or reused."""
    write_json(directory / "file", {"a": 1})
    (directory / "file.jsonl").write_text('{"kind": "train", "step": 1}\n{"kind": "train", "step": 2}\n')
    evaluation = {"format": 2, "k": 4, "trained": {"by_draft_length": []}}
    report = {"evaluation": evaluation, "run": {}, "metrics": []}
    write_sealed_json(directory / "report" / "metrics.json", report)
    write_sealed_json(directory / "report" / "serving.json", {"format": 2, "export": "x", "rows": []})
    times = {"format": 1, "source": "x", "export": "x", "times": []}
    write_sealed_json(directory / "report" / "step_times.json", times)
    Artifact("data", {}, directory).finish(1.0, {"num_samples": 2}, ("file", "file.jsonl"))
    return readers_of(
        directory,
        {
            "json": ("report/metrics.json", lambda d: read_json(d / "report" / "metrics.json")),
            "sealed": ("report/metrics.json", lambda d: read_sealed_json(d / "report" / "metrics.json")),
            "jsonl": ("file.jsonl", lambda d: read_jsonl(d / "file.jsonl")),
            "report": ("report/metrics.json", read_report),
            "serving": ("report/serving.json", read_serving),
            "step_times": ("report/step_times.json", read_step_times),
            "artifact": ("stage.json", _artifact),
        },
    )


def _artifact(directory: Path) -> object:
    artifact = Artifact("data", {}, directory)
    return artifact.finished and (artifact.summary, artifact.damage())


def training_readers(directory: Path) -> dict[str, Reader]:
    """Return the readers of what a training leaves next to its checkpoints."""
    training = directory / "artifacts" / "train-1"
    (training / "checkpoints" / "step-00000001").mkdir(parents=True)
    write_json(training / BEGUN, {"inputs": INPUTS, "continued_from": {"directory": "x", "step": 1}})
    best = directory / "best" / BEST
    write_json(best, {"step": 1, "acceptance_length": 2.0, "files": {"drafter": "drafter.safetensors"}})
    (best.parent / "drafter.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    return readers_of(
        directory,
        {
            "begun": (f"artifacts/train-1/{BEGUN}", lambda d: begun_trainings(d, INPUTS)),
            "earlier": (f"artifacts/train-1/{BEGUN}", _earlier),
            "best": (f"best/{BEST}", lambda d: CheckpointDirectory(d, 2, World(0, 0, 1)).best_weights()),
        },
    )


def _earlier(directory: Path) -> object:
    earlier = find_earlier(directory, None, INPUTS["fixed"], named=True)  # type: ignore[arg-type]
    return earlier and earlier.inputs


def data_readers(directory: Path) -> dict[str, Reader]:
    """Return the readers of answers, of data sets that stages have saved, and of remembered hashes."""
    disable_progress_bars()
    answers = AnswerFile(directory / "answers.jsonl", "hf", "target", SAMPLING)
    append_jsonl(answers.path, answers._header)
    append_jsonl(answers.path, answer_line(0, [1, 2], [3]))
    rows = {"id": ["a", "b"], "input_ids": [[1, 2, 3], [4]], "loss_mask": [[False, True, True], [True]]}
    Dataset.from_dict(rows).save_to_disk(str(directory / "saved"))
    pairs = {"prompt": ["a", "b"], "response": ["c", "d"]}
    Dataset.from_dict(pairs).save_to_disk(str(directory / "chat"))
    tokens = {
        "id": ["a"],
        "input_ids": [[1, 2, 3]],
        "loss_mask": [[False, True, True]],
        "num_prompt_tokens": [1],
    }
    with pa.ipc.new_stream(directory / "block-00000.partial", SAMPLE_SCHEMA) as writer:
        writer.write_batch(pa.RecordBatch.from_pydict(tokens, schema=SAMPLE_SCHEMA))
    _finish_block(directory / "block-00000.arrow", [])
    known = {str(directory / "saved"): [[1, 2, 3, 4], "0" * 64]}
    (directory / "hashes.json").write_text(json.dumps(known))
    return readers_of(
        directory,
        {
            "answers": ("answers.jsonl", _answers),
            "block": ("block-00000.json", lambda d: _finished(d / "block-00000.arrow")),
            "block_arrow": ("block-00000.arrow", lambda d: _finished(d / "block-00000.arrow")),
            "saved_arrow": ("saved/data-00000-of-00001.arrow", _saved),
            "chat_arrow": ("chat/data-00000-of-00001.arrow", _chat),
            "chat_info": ("chat/dataset_info.json", _chat),
            "saved_info": ("saved/dataset_info.json", _saved),
            "saved_state": ("saved/state.json", _saved),
            "hashes": ("hashes.json", lambda d: _remembered(d / "hashes.json")),
        },
    )


def _answers(directory: Path) -> object:
    file = AnswerFile(directory / "answers.jsonl", "hf", "target", SAMPLING)
    found = file.read()
    for number, line in found:
        file.check_prompt(number, line, [1, 2], "prompt")
    return found


def _chat(directory: Path) -> object:
    return read_conversations(str(directory / "chat")).conversations


def _saved(directory: Path) -> object:
    return load_saved(directory / "saved")[:]
