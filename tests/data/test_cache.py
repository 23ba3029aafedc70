import multiprocessing
from multiprocessing.synchronize import Event
from pathlib import Path

from data.cache import build_once

FORK = multiprocessing.get_context("fork")


def build_half(path: Path, begun: Event) -> None:
    def build(directory: Path) -> None:
        (directory / "half").touch()
        begun.set()
        multiprocessing.Event().wait()

    build_once(path, build)


def test_a_directory_is_made_again_after_its_maker_is_killed_and_by_one_of_those_who_wait(
    tmp_path: Path,
) -> None:
    path, begun = tmp_path / "cache" / "made", FORK.Event()
    killed = FORK.Process(target=build_half, args=(path, begun))
    killed.start()
    begun.wait()

    def build(directory: Path) -> None:
        assert not list(directory.iterdir())
        (directory / "whole").touch()
        with (tmp_path / "built").open("a") as file:
            file.write("x")

    waiting = [FORK.Process(target=build_once, args=(path, build)) for _ in range(3)]
    for process in waiting:
        process.start()
    assert not path.exists()
    killed.kill()
    for process in waiting:
        process.join()
        assert process.exitcode == 0
    assert [one.name for one in path.iterdir()] == ["whole"]
    assert (tmp_path / "built").read_text() == "x"
