"""What the cache of the tests returns was made by the code that there is now."""

from pathlib import Path

import pytest

from tests import shared
from tests.shared import make_cached


def test_what_is_cached_is_made_again_when_its_code_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE31_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shared, "ROOT", tmp_path)
    (tmp_path / "code" / "inner").mkdir(parents=True)
    code = tmp_path / "code" / "inner" / "some.py"
    code.write_text("first")
    made = []

    def make(directory: Path) -> None:
        (directory / "file").write_text(code.read_text())
        made.append(directory)
        if code.read_text() == "fails":
            raise InterruptedError

    def content(name: str) -> str:
        return (make_cached(name, [tmp_path / "code"], make) / "file").read_text()

    assert [content("one"), content("one"), content("other")] == ["first"] * 3
    assert len(made) == 2
    code.write_text("fails")
    for _ in range(2):  # what is unfinished is not returned
        with pytest.raises(InterruptedError):
            content("one")
    code.write_text("second")
    assert content("one") == "second"
    code.write_text("first")
    assert content("one") == "first"
    assert len(made) == 5
