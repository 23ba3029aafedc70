"""A check with parts that end in every way: each is recorded, and the next one starts."""

import time
import zipfile
from pathlib import Path

import psutil
import pytest

from eagle31.errors import UserError
from eagle31.json_files import read_json
from train.bench.gpu_check.check import check, chosen
from train.bench.gpu_check.part import PARTS, Part
from train.bench.gpu_check.record import Options
from train.bench.gpu_check.runner import with_reason

MODULES = "tests.train.bench.gpu_check.parts"


def part(name: str, seconds: float = 60.0, gpus: int = 1) -> Part:
    return Part(name, f"The {name} part", f"{MODULES}.{name}", seconds, gpus)


def run(parts: list[Part], directory: Path, *, num_gpus: int = 1, minutes: float = 5.0) -> dict:
    options = Options(directory, dry_run=False, num_gpus=num_gpus)
    results = check(parts, options, minutes=minutes, report=lambda line: None)
    assert [one.part for one in results.outcomes] == parts
    found = read_json(results.numbers)
    page = results.page.read_text()
    for one in found["parts"]:
        assert f"<h2>{one['title']}</h2>" in page
    return {one["name"]: one for one in found["parts"]} | {"page": page}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    names = ("raising", "dying", "wrong", "absent")
    hanging, two = part("hanging", seconds=2.0), Part("two", "Two", f"{MODULES}.passing", 60, gpus=2)
    return run([*map(part, names), hanging, two, part("passing")], tmp_path_factory.mktemp("check"))


def test_every_part_has_its_status(found: dict) -> None:
    statuses = {name: one["status"] for name, one in found.items() if name != "page"}
    assert statuses == {
        "raising": "failed",
        "dying": "failed",
        "wrong": "failed",
        "absent": "not run",
        "hanging": "failed",
        "two": "not run",
        "passing": "passed",
    }


def test_reasons_and_what_was_found_before_are_kept(found: dict) -> None:
    assert found["raising"]["error"] == "RuntimeError: the device is gone"
    assert found["raising"]["figures"] == [{"name": "before", "value": 1, "unit": ""}]
    assert "raise RuntimeError" in found["raising"]["log_tail"]
    assert found["dying"]["error"] == "Its process ended with signal 9."
    assert found["hanging"]["error"] == "It was ended after 2 seconds."
    assert found["absent"]["not_run"] == "There is no such engine here."
    assert found["two"]["not_run"] == "It needs 2 GPUs; this machine has 1."
    assert found["wrong"]["error"] is None


def test_a_part_that_takes_too_long_leaves_no_process(found: dict) -> None:
    [child] = [one["value"] for one in found["hanging"]["figures"]]
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, child
        time.sleep(0.05)


def test_the_page_shows_figures_and_reasons(found: dict) -> None:
    page = found["page"]
    for text in (
        "<title>GPU check: 1 passed, 4 failed, 2 not run</title>",
        "1,234.5 tokens/s",
        "1 + 1 = 2 &lt; 3 &amp; more",
        "RuntimeError: the device is gone",
        "0.3 instead of 0.2",
    ):
        assert text in page


def test_the_message_of_a_command_that_failed_is_part_of_the_error() -> None:
    log = "starting\nerror: first\nerror: vllm: It ended with status 1.\nTraceback"
    assert with_reason("It failed.", log) == "It failed. vllm: It ended with status 1."
    assert with_reason("It failed.", "nothing of note") == "It failed."


def test_parts_after_the_time_of_the_whole_check_are_not_run(tmp_path: Path) -> None:
    found = run([part("passing")], tmp_path, minutes=1e-9)
    assert "--minutes" in found["passing"]["not_run"]


def test_missing_packages_come_from_wheels(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels / "eagle31_test_wheel-1.0-py3-none-any.whl")
    options = Options(tmp_path / "check", dry_run=True, num_gpus=0)
    results = check([part("packaged")], options, minutes=5, wheels=wheels, report=lambda line: None)
    found = read_json(results.numbers)
    assert found["wheels"] == ["eagle31_test_wheel-1.0-py3-none-any.whl"]
    assert found["parts"][0]["figures"] == [{"name": "answer", "value": 42, "unit": ""}]


def test_a_directory_without_wheels_is_refused(tmp_path: Path) -> None:
    options = Options(tmp_path / "check", dry_run=True, num_gpus=0)
    with pytest.raises(UserError, match="no wheels"):
        check([part("passing")], options, minutes=5, wheels=tmp_path, report=lambda line: None)


def test_parts_are_chosen_by_name_in_the_order_of_the_check() -> None:
    assert [one.name for one in chosen(PARTS, ["resume", "parity"])] == ["parity", "resume"]
    assert chosen(PARTS, None) == list(PARTS)
    with pytest.raises(UserError, match="Give some of environment, parity"):
        chosen(PARTS, ["parities"])


def write_wheel(path: Path) -> None:
    information = "eagle31_test_wheel-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("eagle31_test_wheel.py", "ANSWER = 42\n")
        archive.writestr(
            f"{information}/METADATA", "Metadata-Version: 2.1\nName: eagle31_test_wheel\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{information}/RECORD", "")
