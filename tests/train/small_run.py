"""The small run of most tests here: its settings and its results."""

from pathlib import Path

from data.embedded.target import EmbeddedTarget
from eagle31.json_files import read_json, read_jsonl
from tests.processes import wait_for
from tests.runs.forked import Ranks

MAIN = "train/main.py"
RECIPE = "any_target"
STEPS = 24
TEXT_STAGES = "stages=[data,vocab,answers,capture]"


def arguments(target: EmbeddedTarget, output_dir: Path) -> list[str]:
    return [
        f"target.model={target.model}",
        f"data.train={target.train}",
        f"output_dir={output_dir}",
        "data.num_validation=8",
        "data.num_test=6",
        "data.max_tokens=256",
        "data.regenerate.enabled=false",
        "capture.codec=exact",
        "drafter.draft_vocab_size=300",
        "train.row_tokens=256",
        "train.rows_per_step=4",
        f"train.max_steps={STEPS}",
        "train.log_every=1",
        "train.validate_every=8",
        "train.save_every=8",
        "train.ttt_steps=3",
        "optim.lr=3e-3",
        "deepspeed.precision=fp32",
        "evaluate.max_new_tokens=32",
    ]


def wait_for_step(directory: Path, step: int, ranks: Ranks | None = None) -> None:
    """Wait until metrics.jsonl has a record of the step; fail with what the ranks print once none is left."""

    def reached() -> bool:
        assert ranks is None or any(one.is_alive() for one in ranks.processes), ranks.printed()
        paths = directory.glob("artifacts/train-*/metrics.jsonl")
        return any(f'"step": {step},' in path.read_text() for path in paths)

    wait_for(reached, pause=0.02, explain=lambda: f"step {step} was never reached")


def metrics_of(directory: Path) -> list[dict]:
    """Return the records of metrics.jsonl without the fields that depend on time."""
    [path] = (directory / "artifacts").glob("train-*/metrics.jsonl")
    return [{k: v for k, v in record.items() if not depends_on_time(k)} for record in read_jsonl(path)]


def depends_on_time(name: str) -> bool:
    measured = ("validation", "checkpoint", "diagnosis", "data_wait")
    timed = ("seconds", "data_wait_fraction", *(f"{part}_seconds" for part in measured))
    return name in timed or name.startswith("step_seconds") or name.endswith("_per_second")


def saved_steps(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.glob("artifacts/train-*/checkpoints/step-*"))


def assert_faithful(directory: Path) -> None:
    """Check that greedy completions are the target's and that replay equals decoding, on all test prompts."""
    [path] = (directory / "export").resolve().parent.parent.glob("evaluate-*/evaluation.json")
    evaluation = read_json(path)
    assert_agreement(evaluation)
    decoding, [replayed] = (
        evaluation["decoding"],
        [row for row in evaluation["trained"]["by_draft_length"] if row["k"] == evaluation["k"]],
    )
    assert decoding["num_prompts"] == evaluation["num_prompts"] == 6
    assert decoding["num_drafts"] > 20
    if not decoding["completions"]["num_near_tie"] and not decoding["replay"]["num_near_tie"]:
        for name in ("num_drafts", "accepted_per_position"):
            assert decoding[name] == replayed[name]


def assert_agreement(evaluation: dict) -> None:
    """Check that decoding wrote the target's completions and accepted what replay accepts."""
    decoding = evaluation["decoding"]
    assert sum(decoding["completions"].values()) == decoding["num_prompts"] > 0
    assert decoding["replay"]["num_identical"] >= decoding["num_drafts"] * 0.9
    assert decoding["completions"]["num_different"] == 0
    # vLLM's kernel for latent attention on the CPU is less exact than the near-ties of float32.
    if not evaluation["engine"].startswith("vLLM"):
        assert decoding["replay"]["num_different"] == 0
