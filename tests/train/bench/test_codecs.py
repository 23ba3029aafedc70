"""How `scripts/bench/codecs` reads finished runs, and its table."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from data.store.codec import Encoding, encode
from eagle31.errors import UserError
from eagle31.json_files import write_json
from tests.data.store.samples import LENGTHS, make_sample, write_store
from tests.train.torchrun import ROOT
from train.artifact import Artifact
from train.reporting.results import FORMAT


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "bench" / "codecs"))


def finish_run(output_dir: Path, codec: str, acceptance_length: float) -> None:
    """Write the artifacts of a pipeline's last stages, on top of an earlier run's."""
    inputs: dict[str, Any] = {"codec": codec}
    for stage in ("capture", "train", "export"):
        artifact = Artifact.locate(output_dir / "artifacts", stage, inputs)
        inputs = {stage: artifact.key}
        if stage == "capture":
            write_store(artifact.directory / "train", Encoding(codec))
        artifact.directory.mkdir(exist_ok=True)
        artifact.finish(1.0, {})
    (artifact.directory / "checkpoint").mkdir()
    (output_dir / "export").unlink(missing_ok=True)
    (output_dir / "export").symlink_to(artifact.directory / "checkpoint")
    stats = {"k": 4, "num_drafts": 50, "acceptance_length": acceptance_length}
    trained = {"by_draft_length": [stats]}
    evaluation = {"format": FORMAT, "k": 4, "engine": "some engine", "trained": trained}
    (output_dir / "report").mkdir(exist_ok=True)
    report = {"evaluation": evaluation, "run": {}, "metrics": []}
    write_json(output_dir / "report" / "metrics.json", report)


def test_results_are_of_each_runs_store_and_evaluation(script: dict[str, Any], tmp_path: Path) -> None:
    results = []
    for codec, acceptance_length in (("bf16", 2.0), ("fp8", 1.99)):
        finish_run(tmp_path, codec, acceptance_length)
        results.append(script["read_result"](tmp_path))
    for one in results:
        samples = [make_sample(i) for i in range(len(LENGTHS))]
        tensors = [
            tensor for sample in samples for tensor in encode(sample, Encoding(one.codec, "all")).values()
        ]
        assert one.all_states_bytes == sum(tensor.nbytes for tensor in tensors)
    first, other = results
    assert (first.codec, other.codec) == ("bf16", "fp8")
    assert first.num_tokens == sum(LENGTHS)
    conditions, _, *rows = script["table"](results).splitlines()
    assert conditions == f"7 samples, {sum(LENGTHS)} tokens; k = 4, temperature 0, some engine"
    assert [row.split()[-3:] for row in rows] == [["2.000", "+0.00%", "50"], ["1.990", "-0.50%", "50"]]
    ratios = [f"{other.store_bytes / whole:.3f}" for whole in (first.store_bytes, first.all_states_bytes)]
    assert rows[1].split()[3:5] == ratios


def test_online_capture_is_refused(script: dict[str, Any]) -> None:
    arguments = ["recipe=any_target", "target.model=nowhere", "data.train=nowhere", "capture=hf_online"]
    with pytest.raises(UserError, match=r"capture\.mode"):
        script["run_with_codec"](arguments, "bf16")
