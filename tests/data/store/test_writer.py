import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
import torch

from data.store import HiddenStateStore
from data.store import writer as writer_module
from data.store.index import missing_ids, write_manifest
from data.store.shards import SHARD_NAME, FinishedShards, ShardFile, write_shard
from data.store.writer import StoreWriter, remove_leftovers
from eagle31.errors import UserError
from tests.data.store.samples import (
    EXACT,
    LENGTHS,
    append_all,
    assert_equal,
    captured_ids,
    encoded,
    make_sample,
    settings,
)

SHARD_TOKENS = 15


def records(directory: Path) -> list[list[int]]:
    return [list(record.sample_ids) for record in FinishedShards(directory).records()]


def test_shards_close_when_full_and_hold_samples_in_order(tmp_path: Path) -> None:
    append_all(tmp_path, [6, 1, 4, 0, 3], shard_tokens=15)  # of 8, 9, 2, 5 and 14 tokens
    assert records(tmp_path) == [[6, 1], [4, 0, 3]]
    for record in FinishedShards(tmp_path).records():
        assert record.rows[:, 0].tolist() == [LENGTHS[i] for i in record.sample_ids]


def test_many_writers_share_a_directory_and_number_their_own_shards(tmp_path: Path) -> None:
    threads = [
        Thread(target=append_all, args=(tmp_path, range(i, 40, 4), name))
        for i, name in enumerate(["a", "a-1", "a-00001", "b"])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert captured_ids(tmp_path) == set(range(40))
    append_all(tmp_path, [40], "a")
    names = map(SHARD_NAME.fullmatch, (record.file for record in FinishedShards(tmp_path).records()))
    found = {name[0] for name in names if name and name["writer"] == "a"}
    assert found == {f"shard-a-{n:05d}.safetensors" for n in range(len(found))}


def test_another_process_under_the_same_name_is_refused_and_loses_nothing(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path, "a", EXACT, 100)
    append_all(tmp_path, [2], "a")
    writer.append(1, make_sample(1))
    with pytest.raises(UserError, match="Another process writes to it as a"):
        writer.close()
    assert captured_ids(tmp_path) == {2}


def test_a_shard_fills_while_the_one_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample, num_appended, num_written, held = make_sample(0), 0, 0, []  # of 5 tokens

    def write_slowly(path, samples):
        nonlocal num_written
        time.sleep(0.02)
        held.append(num_appended - num_written)
        num_written += len(samples)
        write_shard(path, samples)

    monkeypatch.setattr(writer_module, "write_shard", write_slowly)
    with StoreWriter(tmp_path, "a", EXACT, shard_tokens=10) as writer:
        for sample_id in range(12):
            num_appended += 1
            writer.append(sample_id, sample)
    assert max(held) == 4
    assert captured_ids(tmp_path) == set(range(12))


def test_a_failure_in_the_background_is_raised_and_finished_shards_stay(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path, "a", EXACT, shard_tokens=5)
    writer.append(0, make_sample(0))
    writer.flush()
    writer.append(1, replace(make_sample(5), final_hidden_states=torch.zeros(1, 4).bfloat16()))
    writer.append(2, make_sample(1))
    with pytest.raises(AssertionError, match="final_hidden_states"):
        writer.flush()
    with pytest.raises(AssertionError, match="final_hidden_states"):
        writer.close()
    append_all(tmp_path, [1, 2])
    assert captured_ids(tmp_path) == {0, 1, 2}


def test_a_full_disk_is_said_and_finished_shards_are_kept(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path, "a", EXACT, shard_tokens=15)
    writer.append(3, make_sample(3))
    writer.flush()
    (tmp_path / ".shard-a-00001.safetensors.partial").symlink_to("/dev/full")
    writer.append(1, make_sample(1))
    with pytest.raises(UserError, match=r"disk is full; finished shards are kept; choose another disk"):
        writer.close()
    assert records(tmp_path) == [[3]]
    assert {path.name for path in tmp_path.iterdir() if "00001" in path.name} == set()
    append_all(tmp_path, [1])
    assert captured_ids(tmp_path) == {1, 3}


def _capture_missing(directory: Path, num_samples: int, log: Path, last: int | None, pause: float) -> None:
    """Capture what is missing; after the `last` sample be killed, at whatever the writer's thread is then."""
    missing = missing_ids(directory, FinishedShards(directory).records(), num_samples)
    with StoreWriter(directory, "a", EXACT, SHARD_TOKENS) as writer, log.open("a", buffering=1) as file:
        for number, sample_id in enumerate(missing):
            writer.append(sample_id, make_sample(sample_id))
            print(sample_id, file=file)
            if number == last:
                time.sleep(pause)
                os.kill(os.getpid(), signal.SIGKILL)


def test_killed_at_any_moment_every_sample_is_there_once(tmp_path: Path) -> None:
    directory, log, num_samples = tmp_path / "store", tmp_path / "log", 150
    directory.mkdir()
    rng, fork = random.Random(0), multiprocessing.get_context("fork")
    for kill in (*range(12), None):
        before = captured_ids(directory)
        log.write_text("")
        moment = (None, 0.0) if kill is None else (rng.randrange(18), rng.uniform(0, 0.002))
        process = fork.Process(target=_capture_missing, args=(directory, num_samples, log, *moment))
        process.start()
        process.join()
        assert process.exitcode == (0 if kill is None else -signal.SIGKILL)
        appended = {int(line) for line in log.read_text().split()}
        assert not before & appended
        lost = appended - captured_ids(directory)
        assert sum(LENGTHS[i % 7] for i in lost) <= 2 * SHARD_TOKENS + max(LENGTHS)
        for record in FinishedShards(directory).records():
            assert not list(ShardFile(directory / record.file).altered_samples())
    held = Counter(i for record in FinishedShards(directory).records() for i in record.sample_ids)
    assert held == Counter(range(num_samples))
    write_manifest(FinishedShards(directory), settings(num_samples))
    for sample_id, sample in enumerate(HiddenStateStore(directory).get_many(range(num_samples))):
        assert_equal(sample, encoded(sample_id))
    assert not [path for path in directory.iterdir() if path.name.endswith(".partial")]


def test_leftovers_of_all_writers_go_at_the_end(tmp_path: Path) -> None:
    append_all(tmp_path, [3], "a")
    for name in ("a", "b"):
        (tmp_path / f".shard-{name}-00007.safetensors.partial").write_bytes(b"half")
        (tmp_path / f"shard-{name}-00008.safetensors").write_bytes(b"no shard")
    remove_leftovers(FinishedShards(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["shard-a-00000.safetensors"]
