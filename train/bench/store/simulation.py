"""A store of very many small shards, and what opening, polling and reading it take in each process."""

import json
import multiprocessing
import os
import random
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from data.progress import tracked
from data.store import HiddenStateStore
from data.store.codec import Encoding
from data.store.index import claim, missing_ids, write_manifest
from data.store.shards import FinishedShards, write_shard

_ENCODING = Encoding("bf16", "all")
_WRITERS = 8
_FORK = multiprocessing.get_context("fork")  # the processes share what Python has imported
_MAX_SECONDS = 600
_MB = 10**6


@dataclass(frozen=True)
class Scale:
    """The size of the simulated store, and how much of the work is done."""

    num_samples: int = 1_000_000
    num_shards: int = 61_000
    num_ranks: int = 512
    num_processes: int = 8  # of the ranks, those that are started
    num_reads: int = 2_000  # samples that each process reads at random

    @property
    def fields(self) -> dict[str, object]:
        return {
            "target": "none",
            "target_revision": None,
            "dtype": "bfloat16",
            "aux_layer_ids": [0],
            "encoding": _ENCODING.to_json(),
            "tokens_fingerprint": "none",
            "dataset_samples": self.num_samples,
        }


@dataclass(frozen=True)
class Finishing:
    """What the process takes that decides whether the store is finished. Seconds are of CPU time."""

    first_look_seconds: float  # finding the shards and the missing samples for the first time
    poll_seconds: float  # doing it again where nothing has changed
    poll_new_seconds: float  # doing it again after another shard
    write_seconds: float  # writing the index and the manifest
    private_mb: float  # the memory that this adds


@dataclass(frozen=True)
class Start:
    """What one rank takes at its start and for reading. Seconds are of CPU time."""

    open_seconds: float  # opening the store
    verify_seconds: float  # its part of verification
    read_mb: float  # what the two read
    private_mb: float  # the memory that they add, without what processes of a machine share
    sample_milliseconds: float  # a random sample


@dataclass(frozen=True)
class Everywhere:
    """What is left open after one process has read a sample of every shard, or why it could not."""

    num_shards: int
    open_files: int
    mappings: int
    error: str


def write_store(directory: Path, scale: Scale, progress: bool = False) -> None:
    """Write the shards of samples of one token; the store is not finished then."""
    claim(directory, scale.fields)
    sample = {
        "input_ids": torch.ones(1, dtype=torch.int32),
        "loss_mask": torch.ones(1, dtype=torch.bool),
        "aux_hidden_states": torch.ones(1, 1, 4, dtype=torch.bfloat16),
        "final_hidden_states": torch.ones(1, 4, dtype=torch.bfloat16),
    }
    # Samples come in no order, as several engines finish them.
    ids = np.random.default_rng(0).permutation(scale.num_samples)
    parts = np.array_split(ids, scale.num_shards)
    for number, part in enumerate(tracked(parts, "write", "shards", shown=progress)):
        name = f"shard-engine-{number % _WRITERS}-{number // _WRITERS:05d}.safetensors"
        write_shard(directory / name, _ENCODING, [(sample_id, sample) for sample_id in part.tolist()])


def measure_finishing(directory: Path, scale: Scale) -> Finishing:
    """Measure rank 0 at the end of a capture, in a process of its own. It finishes the store."""
    return Finishing(**_in_process(_finishing, directory, scale))


def measure_starts(directory: Path, scale: Scale) -> list[Start]:
    """Measure the start of some of the ranks, at the same time, and what reading takes."""
    ranks = [index * (scale.num_ranks // scale.num_processes) for index in range(scale.num_processes)]
    return [Start(**found) for found in _in_processes([(_start, directory, scale, rank) for rank in ranks])]


def measure_everywhere(directory: Path) -> Everywhere:
    """Read one sample of every shard in one process."""
    return Everywhere(**_in_process(_everywhere, directory))


def _finishing(directory: Path, scale: Scale) -> dict:
    before = _private_mb()
    shards = FinishedShards(directory)

    def look() -> None:
        assert missing_ids(directory, shards.records(), scale.num_samples) == []

    first = _cpu_seconds(look)
    unchanged = _cpu_seconds(look)
    [path] = directory.glob("shard-engine-0-00000.json")
    content = path.read_text()
    path.unlink()
    shards.records()
    path.write_text(content)
    changed = _cpu_seconds(look)
    written = _cpu_seconds(lambda: write_manifest(directory, scale.fields, shards.records()))
    return asdict(Finishing(first, unchanged, changed, written, _private_mb() - before))


def _start(directory: Path, scale: Scale, rank: int) -> dict:
    before, read_before = _private_mb(), _read_bytes()
    opened: list[HiddenStateStore] = []
    open_seconds = _cpu_seconds(lambda: opened.append(HiddenStateStore(directory)))
    [store] = opened
    verify_seconds = _cpu_seconds(lambda: store.verify(rank, scale.num_ranks, cache_dir=directory / ".cache"))
    read_mb, private_mb = (_read_bytes() - read_before) / _MB, _private_mb() - before
    indices = random.Random(rank).choices(range(len(store)), k=scale.num_reads)
    seconds = _cpu_seconds(lambda: store.get_many(indices))
    milliseconds = 1e3 * seconds / scale.num_reads
    return asdict(Start(open_seconds, verify_seconds, read_mb, private_mb, milliseconds))


def _everywhere(directory: Path) -> dict:
    store, error, num_read = HiddenStateStore(directory), "", 0
    for index in np.unique(store.files, return_index=True)[1]:
        try:
            store[int(index)]
            num_read += 1
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"[:80]
            break
    files = len(os.listdir("/proc/self/fd"))
    with open("/proc/self/maps", encoding="utf-8") as maps:
        mappings = sum(f"{directory}/shard-" in line for line in maps)
    return asdict(Everywhere(num_read, files, mappings, error))


def _cpu_seconds(work: Callable[[], object]) -> float:
    before = _cpu()
    work()
    return _cpu() - before


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _private_mb() -> float:
    """Return the memory that this process shares with no other, and has written to."""
    with open("/proc/self/smaps_rollup", encoding="utf-8") as rollup:
        sizes = [int(line.split()[1]) for line in rollup if line.startswith("Private_Dirty")]
    return sum(sizes) * 1024 / _MB


def _read_bytes() -> int:
    with open("/proc/self/io", encoding="utf-8") as counters:
        return next(int(line.split()[1]) for line in counters if line.startswith("rchar"))


def _in_process(work: Callable[..., dict], *arguments: object) -> dict:
    return _in_processes([(work, *arguments)])[0]


def _in_processes(calls: list[tuple]) -> list[dict]:
    """Run each call in a process of its own, all at the same time."""
    pipes, processes = [], []
    for work, *arguments in calls:
        receiver, sender = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_send, args=(sender, work, *arguments))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    found = []
    for receiver, process in zip(pipes, processes, strict=True):
        try:
            assert receiver.poll(_MAX_SECONDS), "a process takes too long"
            found.append(json.loads(receiver.recv()))
        except EOFError:
            sys.exit("a process of the simulation has failed")
        finally:
            process.join(_MAX_SECONDS)
    return found


def _send(
    sender: multiprocessing.connection.Connection, work: Callable[..., dict], *arguments: object
) -> None:
    sender.send(json.dumps(work(*arguments)))
    sender.close()
