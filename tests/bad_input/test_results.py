"""What a run leaves in its output directory, and what it does not replace there."""

import os
import stat
from pathlib import Path

import pytest

from data.embedded.target import EmbeddedTarget
from eagle31.errors import UserError
from tests.train.small_run import RECIPE, arguments
from tests.train.torchrun import run_here


def test_what_a_run_writes_follows_the_umask(finished: tuple[Path, str]) -> None:
    umask = os.umask(0)
    os.umask(umask)
    others = {
        path: oct(_mode(path))
        for path in finished[0].rglob("*")
        if not path.is_symlink() and _mode(path) != (0o777 if path.is_dir() else 0o666) & ~umask
    }
    assert others == {}


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_directory_is_not_replaced_by_the_link_to_the_export(
    small_target: EmbeddedTarget, tmp_path: Path
) -> None:
    place = tmp_path / "run" / "export"
    place.mkdir(parents=True)
    with pytest.raises(UserError, match=r"run/export: It is not the link .* move it elsewhere"):
        run_here(RECIPE, *arguments(small_target, tmp_path / "run"))
    assert not (tmp_path / "run" / "artifacts").exists()
