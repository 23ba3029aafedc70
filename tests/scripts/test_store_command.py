from pathlib import Path

import pytest

from data.store.index import claim, refuse
from tests.data.store.samples import append_all, flip_last_byte, settings, write_store
from tests.runs.here import Outcome, run_command


def store(*arguments: object) -> Outcome:
    return run_command("scripts/store", *arguments)


def words(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines()]


def test_info_tells_what_is_there_and_what_is_not(tmp_path: Path) -> None:
    claim(tmp_path, settings(codec="fp8"))
    append_all(tmp_path, [0, 1, 2], "left", "fp8")
    append_all(tmp_path, [3], "right", "fp8")
    refuse(tmp_path, 5, "too long for the server")
    done = store("info", tmp_path)
    assert done.status == 0, done.err
    assert "no, 2 of 7 samples are missing" in done.out
    assert ["codec", "fp8"] in words(done.out)
    lines = words(done.out)
    assert ["samples", "4,", "1", "refused"] in lines
    assert ["tokens", "31"] in lines
    assert "in 2 shards" in done.out
    assert "sample 5: too long for the server" in done.out


def test_verify_names_the_damaged_shard(tmp_path: Path) -> None:
    write_store(tmp_path)
    done = store("verify", tmp_path)
    assert (done.status, done.out) == (0, "4 shards match their checksums\n")
    flip_last_byte(tmp_path / "shard-b-00000.safetensors")
    done = store("verify", tmp_path)
    assert done.status == 1
    assert str(tmp_path / "shard-b-00000.safetensors") in done.out
    assert "shard-a" not in done.out


@pytest.mark.parametrize("command", ["info", "verify", "retry"])
def test_what_is_no_store_is_refused(tmp_path: Path, command: str) -> None:
    done = store(command, tmp_path)
    assert done.status == 2
    assert done.err.startswith(f"error: STORE={tmp_path}: The directory holds no store")


def test_retry_forgets_the_refusals_and_reopens_the_stage(tmp_path: Path) -> None:
    directory = tmp_path / "train"
    claim(directory, settings())
    append_all(directory, [0, 1, 2, 3, 4, 6], "all")
    refuse(directory, 5, "too long for the server")
    stage = tmp_path / "stage.json"
    stage.write_text("{}")
    done = store("retry", directory)
    assert done.status == 0, done.err
    assert "sample 5: too long for the server" in done.out
    assert not stage.exists()
    assert "no, 1 of 7 samples are missing" in store("info", directory).out
    assert "No sample was refused" in store("retry", directory).out
