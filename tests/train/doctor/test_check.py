"""Checks and their table."""

import pytest

from eagle31.errors import UserError
from train.doctor.check import Check, Status, judged, lacks, ok, refuse_lacking, table

GOOD = ok("clock", "0 s", "5 s")
SLOW = judged("umask", False, "077", "022", "Set umask 022.", otherwise=Status.warning)
BAD = judged("disk", False, "1 GB free", "3 GB", "Free some space.", field="output_dir", value="/full")


def test_only_what_is_lacking_keeps_a_run_from_starting() -> None:
    assert lacks([GOOD, SLOW, BAD]) == [BAD]
    refuse_lacking([GOOD, SLOW])
    with pytest.raises(UserError, match=r"^output_dir=/full: Free some space\.$"):
        refuse_lacking([GOOD, SLOW, BAD])


def test_a_good_check_has_no_remedy() -> None:
    assert judged("disk", True, "9 GB free", "3 GB", "Free some space.").remedy == ""


def test_the_table_has_a_line_for_each_check_and_breaks_long_cells() -> None:
    lines = table([GOOD, SLOW, BAD], width=90)
    assert lines[0].split() == ["check", "found", "needed", "remedy"]
    assert [line.split()[0] for line in lines[1:]] == ["ok", "warning", "lacking"]
    long = Check("disk", Status.lacking, "found " * 20, "needs 110 GB", "do this " * 12)
    lines = table([long], width=90)
    assert len(lines) > 3
    assert max(map(len, lines)) <= 90
    assert " ".join(lines[1:]).split().count("found") == 20


def test_a_size_is_not_broken() -> None:
    lines = table([Check("disk", Status.lacking, "x", "checkpoints and the export 110 GB, target", "")])
    assert any("110 GB" in line for line in lines)


def test_json_has_the_status_by_name_and_no_value() -> None:
    expected = {"name": "disk", "status": "lacking", "found": "1 GB free", "needed": "3 GB"}
    assert BAD.to_json() == expected | {"remedy": "Free some space."}
