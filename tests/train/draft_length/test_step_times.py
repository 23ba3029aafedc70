import json
from pathlib import Path

import pytest

from eagle31.errors import UserError
from train.draft_length.step_times import StepTimes, read_times

TIMES = StepTimes(1, (10.0, 20.0), {2: (12.0, 24.0), 4: (14.0, 28.0), 8: (22.0, 44.0)}, {4: (3.0, 6.0)})


def test_times_are_interpolated_between_and_extrapolated_outside() -> None:
    assert TIMES.at(0) == pytest.approx([10, 20])
    assert TIMES.at(4) == pytest.approx([14, 28])
    assert TIMES.at(3) == pytest.approx([13, 26])
    assert TIMES.at(6) == pytest.approx([18, 36])
    assert TIMES.at(9) == pytest.approx([24, 48])
    assert TIMES.at(1) == pytest.approx([11, 22])
    assert [k for k in range(11) if TIMES.covers(k)] == [0, 2, 3, 4, 5, 6, 7, 8]


def test_no_extrapolated_step_is_shorter_than_one_without_a_drafter() -> None:
    steep = StepTimes(1, (10.0,), {4: (11.0,), 5: (15.0,)})
    assert steep.at(1) == pytest.approx([10])


def test_the_error_is_that_of_a_known_time_that_is_interpolated() -> None:
    assert TIMES.interpolation_error() == pytest.approx((12 + 10 / 3) / 14 - 1)
    assert StepTimes(1, (1.0,), {1: (2.0,), 2: (3.0,)}).interpolation_error() is None


def test_longer_drafts_with_shorter_steps_contradict_each_other() -> None:
    assert TIMES.contradictions() == []
    noisy = StepTimes(1, (10.0,), {2: (30.0,), 4: (29.0,), 8: (12.0,)})
    assert noisy.contradictions() == [(4, 8)]


def test_json_keeps_everything() -> None:
    assert StepTimes.from_json(json.loads(json.dumps(TIMES.to_json()))) == TIMES


def test_the_users_times_are_read_from_yaml_and_json(tmp_path: Path) -> None:
    entry = {
        "concurrency": 4,
        "target_ms": 20,
        "verify_ms": {4: 22, 8: 30},
        "draft_ms": 1.5,
        "overhead_ms": 2,
    }
    yaml, as_json = tmp_path / "times.yaml", tmp_path / "times.json"
    yaml.write_text(f"- {entry}\n- {entry | {'concurrency': 1, 'overhead_ms': 0}}\n")
    as_json.write_text(json.dumps([entry]))
    one, four = read_times(yaml)
    assert (one.concurrency, four.concurrency) == (1, 4)
    assert [four] == read_times(as_json)
    assert four.at(0) == pytest.approx([20])
    assert four.at(4) == pytest.approx([22 + 4 * 1.5 + 2])
    assert four.at(6) == pytest.approx([26 + 6 * 1.5 + 2])
    assert one.at(1) == pytest.approx([20.5 + 1.5])  # between the target's step and drafts of 4 tokens
    assert [k for k in range(10) if four.covers(k)] == list(range(9))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a list with an entry"),
        ("{]", "neither YAML nor JSON"),
        ("concurrency: 1", "a list with an entry"),
        ("- 3", "a mapping"),
        ("- {concurrency: 0}", "concurrency=0: .*at least 1"),
        ("- {concurrency: 1, targets_ms: 3}", "targets_ms=3: There is no such key"),
        ("- {concurrency: 1, target_ms: -2, draft_ms: 1}", "target_ms=-2: .*above 0"),
        ("- {concurrency: 1, target_ms: .nan, draft_ms: 1}", "target_ms=nan"),
        ("- {concurrency: 1, target_ms: 2}", "draft_ms=None"),
        ("- {concurrency: 1, target_ms: 2, draft_ms: 1}", "verify_ms=None: .*by draft length"),
        ("- {concurrency: 1, target_ms: 2, draft_ms: 1, verify_ms: {x: 1}}", "verify_ms=x: .*whole numbers"),
        ("- {concurrency: 1, target_ms: 2, draft_ms: 1, verify_ms: {4: true}}", "verify_ms.4=True"),
        ("- {concurrency: 1, target_ms: 2, draft_ms: 1, verify_ms: {1: 3}}", "at least 2"),
        (
            "- {concurrency: 1, target_ms: 2, draft_ms: 1, verify_ms: {4: 3}, overhead_ms: -1}",
            "overhead_ms=-1",
        ),
        (
            "- &a {concurrency: 1, target_ms: 2, draft_ms: 1, verify_ms: {4: 3}}\n- *a",
            "concurrency=1: .*twice",
        ),
    ],
)
def test_bad_times_are_refused_with_the_remedy(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "times.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        read_times(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_times(tmp_path / "none.yaml")
