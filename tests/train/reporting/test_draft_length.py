import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle31.errors import UserError
from eagle31.json_files import write_json
from tests.train.reporting.finished_run import evaluation, run_info
from tests.train.reporting.measured import acceptance
from train.draft_length.step_times import StepTimes
from train.reporting.draft_length import (
    Timing,
    check_step_times,
    choice_lines,
    draft_lengths,
    read_step_times,
    write_step_times,
)
from train.reporting.report import refresh_page

SCRIPT = Path(__file__).parents[3] / "scripts" / "report"
# With one user a step hardly gets longer with the draft; with 64 every token costs.
TIMING = Timing(
    "vLLM on a GPU",
    [
        StepTimes(1, (20.0,), {2: (21.0,), 4: (22.0,), 6: (23.0,)}, {4: (1.5,)}),
        StepTimes(64, (40.0,), {2: (110.0,), 4: (190.0,), 6: (290.0,)}),
    ],
)


def measured() -> dict[str, Any]:
    known = evaluation()
    sampling = known["sampling"] | {"greedy_drafts": acceptance(0.5, seed=1)}
    return known | {"trained": acceptance(0.8), "sampling": sampling}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    known = {"evaluation": measured(), "run": run_info(), "metrics": []}
    write_json(tmp_path / "report" / "metrics.json", known)
    return tmp_path


def words(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


def test_each_concurrency_and_temperature_has_its_draft_length_and_command() -> None:
    cold, warm = draft_lengths(measured(), TIMING)
    assert (cold.temperature, warm.temperature) == (0.0, 1.0)
    assert [choice.best.k for choice in cold.choices] == [6, 0]
    assert warm.choices[0].best.k < 6
    text = words(choice_lines(measured(), run_info(), TIMING))
    target, export = run_info()["target"], run_info()["export"]
    config = f'{{"model": "{export}", "method": "eagle3", "num_speculative_tokens": 6'
    assert f"# k = 6; users: 1 at temperature 0 vllm serve {target} --speculative-config '{config}}}'" in text
    schedule = '"num_speculative_tokens_per_batch_size": [[1, 63, 6], [64, 64, 0]]'
    assert (
        f"# a load that varies, temperature 0 vllm serve {target} --speculative-config '{config}, {schedule}"
        in text
    )
    assert f"at temperature 1 vllm serve {target} #" in text  # without a drafter
    assert "4 22.00 1.50 20.50" in text  # a step, drafting in it, and the rest
    assert "* extrapolated, because the times are known for draft lengths 2 to 6" in text


def test_times_that_contradict_each_other_are_a_warning() -> None:
    noisy = Timing("a busy machine", [StepTimes(1, (9.0,), {2: (30.0,), 4: (12.0,)})])
    text = words(choice_lines(measured(), run_info(), noisy))
    assert "WARNING: at 1 users a step took longer with k = 2 than with k = 4" in text
    assert "takes three draft lengths" in text


def test_too_few_times_are_refused() -> None:
    with pytest.raises(UserError, match="-k=4: Two draft lengths"):
        check_step_times(Timing("vLLM", [StepTimes(1, (9.0,), {4: (12.0,)})]))
    with pytest.raises(UserError, match="--max-new-tokens"):
        check_step_times(Timing("vLLM", []))


def test_the_page_has_the_choice_of_the_runs_own_export(run: Path) -> None:
    assert "Which draft length to serve" not in refresh_page(run).read_text(encoding="utf-8")
    write_step_times(run, TIMING)
    assert read_step_times(run) == TIMING
    html = refresh_page(run).read_text(encoding="utf-8")
    assert "Which draft length to serve" in html
    assert html.count("Predicted speed-up by draft length</h3>") == 2
    (run / "another").mkdir()
    (run / "export").symlink_to(run / "another")
    assert read_step_times(run) is None
    assert "Which draft length to serve" not in refresh_page(run).read_text(encoding="utf-8")


def test_the_command_takes_the_users_times_and_keeps_them(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def report(*arguments: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["report", *map(str, arguments)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return ended.value.code, *capsys.readouterr()

    status, _, error = report("serve-k", run)
    assert (status, error.startswith("error: RUN=")) == (2, True)
    assert "scripts/bench/serving" in error
    times = run / "mine.yaml"
    times.write_text("- {concurrency: 8, target_ms: 20, verify_ms: {4: 21, 8: 22}, draft_ms: 0.4}\n")
    status, printed, _ = report("serve-k", run, "--times", times)
    assert status == 0
    assert "mine.yaml, given by the user" in printed
    assert report("serve-k", run)[1] == printed
    times.write_text("- {concurrency: 8}\n")
    assert report("serve-k", run, "--times", times)[0] == 2
