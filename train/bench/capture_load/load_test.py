"""The load test: an undisturbed phase, a disturbed one, and a check of what every client has got."""

import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from data.capture.opening import StoreSpec
from data.store.shards import captured_ids
from data.vllm.client import capture_through_vllm
from data.vllm.server import VllmServer
from data.vllm.server_process import ServerProcess
from eagle31.errors import UserError
from eagle31.json_files import read_jsonl
from train.bench.capture_load.disturbances import Disturber
from train.bench.capture_load.inputs import (
    ENCODING,
    MANIFEST_FIELDS,
    SHARD_TOKENS,
    LoadSettings,
    expected_states,
    make_samples,
    save_target,
)
from train.bench.capture_load.processes import (
    LoadClient,
    LoadServer,
    compile_slow_disk,
    switch_slow_disk,
    wait_until,
)

KINDS = ("capture", "trainer", "writer")
NUM_SERVERS, CLIENTS_PER_KIND = 3, 2
MAX_DIFFERENCE = 1e-4
_POLL_SECONDS, _END_SECONDS, _START_SECONDS = 0.2, 900.0, 600.0


def run_load(
    work: Path, *, minutes: float, num_samples: int, every_seconds: float, stall_seconds: float
) -> dict[str, Any]:
    """Run the test and return its result; `passed` says whether every client has every sample exactly once.

    Args:
        minutes: the length of the disturbed phase.
        num_samples: the samples of a round.
        every_seconds: the time between disturbances.
        stall_seconds: the time without progress after which a server counts as hung.
    """
    (work / "stores").mkdir(parents=True)
    settings = LoadSettings(str(work), [], num_samples, concurrency=4)
    save_target(settings.spec)
    compile_slow_disk(work)
    servers: list[LoadServer] = []
    clients: list[LoadClient] = []
    try:
        for index in range(NUM_SERVERS):
            servers.append(LoadServer(f"server-{index}", settings, index == 0, stall_seconds))
        for server in servers:
            server.process.wait_until_ready(progress=True)
        settings.urls.extend(server.process.url for server in servers)
        _capture_reference(settings)
        for kind in KINDS:
            clients += [LoadClient(f"{kind}-{i}", kind, settings) for i in range(CLIENTS_PER_KIND)]
        return _run_phases(settings, servers, clients, 60 * minutes, every_seconds)
    finally:
        for client in clients:
            client.end()
        with ThreadPoolExecutor() as pool:
            list(pool.map(ServerProcess.close, [server.process for server in servers]))


def _run_phases(
    settings: LoadSettings,
    servers: Sequence[LoadServer],
    clients: Sequence[LoadClient],
    seconds: float,
    every_seconds: float,
) -> dict[str, Any]:
    work, disturber = Path(settings.work), Disturber(servers, clients)

    def begun() -> bool:
        disturber.look_after()
        return all(client.begun.exists() for client in clients) or any(client.failures for client in clients)

    if not wait_until(begun, _START_SECONDS) or any(client.failures for client in clients):
        raise UserError("--work", work, f"The clients did not begin: {clients[0].failures}")
    undisturbed = _phase(settings, clients, disturber, max(15.0, 0.15 * seconds), None)
    switch_slow_disk(work, True)
    disturbed = _phase(settings, clients, disturber, seconds, every_seconds)
    switch_slow_disk(work, False)
    _say("waiting for what has not recovered, and for the clients' last rounds")
    settings.stop_file.touch()

    def ended() -> bool:
        disturber.look_after()
        return disturber.all_recovered and not any(client.running for client in clients)

    in_time = wait_until(ended, _END_SECONDS)
    return _result(settings, servers, clients, disturber, undisturbed, disturbed, in_time)


def _phase(
    settings: LoadSettings,
    clients: Sequence[LoadClient],
    disturber: Disturber,
    seconds: float,
    every_seconds: float | None,
) -> dict[str, float]:
    """Let the clients work for a while; return the seconds and the samples that they have got."""
    began, before = time.monotonic(), _num_done(settings, clients)
    next_disturbance = began + (every_seconds or 0.0)
    while time.monotonic() - began < seconds:
        disturber.look_after()
        if every_seconds is not None and time.monotonic() >= next_disturbance:
            next_disturbance += every_seconds
            if (done := disturber.disturb()) is not None:
                _say(f"{time.monotonic() - began:.0f} s: {done.kind} ({done.target})")
        time.sleep(_POLL_SECONDS)
    took = time.monotonic() - began
    return {"seconds": round(took, 1), "samples": _num_done(settings, clients) - before}


def _num_done(settings: LoadSettings, clients: Sequence[LoadClient]) -> int:
    """Return the samples of all finished rounds, and of those that have begun."""
    total = 0
    for client in clients:
        rounds = _rounds(settings, client)
        total += len(rounds) * settings.num_samples
        part = settings.client_directory(client.name) / f"round-{len(rounds)}"
        if client.kind == "trainer":
            lines = part.with_suffix(".jsonl")
            total += len(read_jsonl(lines)) if lines.exists() else 0
        elif part.exists():
            try:
                total += len(captured_ids(part))
            except FileNotFoundError:
                total += settings.num_samples  # finished just now, and removed
    return total


def _rounds(settings: LoadSettings, client: LoadClient) -> list[dict[str, Any]]:
    log = Path(settings.work) / f"{client.name}.jsonl"
    return read_jsonl(log) if log.exists() else []


def _capture_reference(settings: LoadSettings) -> None:
    capture_through_vllm(
        [StoreSpec(settings.reference, make_samples(settings.num_samples), ENCODING)],
        expected_states(settings.spec),
        [VllmServer(settings.urls[0], 4)],
        shard_tokens=SHARD_TOKENS,
        manifest_fields=MANIFEST_FIELDS,
    )


def _result(
    settings: LoadSettings,
    servers: Sequence[LoadServer],
    clients: Sequence[LoadClient],
    disturber: Disturber,
    undisturbed: dict[str, float],
    disturbed: dict[str, float],
    in_time: bool,
) -> dict[str, Any]:
    rounds = {client.name: _rounds(settings, client) for client in clients}
    every = [one for own in rounds.values() for one in own]
    rates = [phase["samples"] / phase["seconds"] for phase in (undisturbed, disturbed)]
    failures = [f"{client.name}: {failure}" for client in clients for failure in client.failures]
    difference = max((one["largest_difference"] for one in every), default=float("inf"))
    result: dict[str, Any] = {
        "disturbances": disturber.table(),
        "rounds": {name: len(own) for name, own in rounds.items()},
        "samples_per_round": settings.num_samples,
        "samples": sum(one["num_samples"] for one in every),
        "rounds_with_every_sample_once": sum(one["exactly_once"] for one in every),
        "duplicates_dropped": sum(one["duplicates_dropped"] for one in every),
        "largest_difference": difference,
        "server_starts": sum(server.process.num_starts for server in servers),
        "undisturbed": undisturbed | {"samples_per_second": round(rates[0], 2)},
        "disturbed": disturbed | {"samples_per_second": round(rates[1], 2)},
        "throughput_of_undisturbed": round(rates[1] / rates[0], 3) if rates[0] else None,
        "unexpected_ends": failures,
        "ended_in_time": in_time,
        "cores": len(os.sched_getaffinity(0)),
    }
    complete = all(rounds.values()) and all(one["exactly_once"] for one in every)
    result["passed"] = complete and difference <= MAX_DIFFERENCE and in_time and not failures
    return json.loads(json.dumps(result))


def _say(line: str) -> None:
    print(f"capture_load: {line}", file=sys.stderr, flush=True)
