"""A rank that hangs is named: one that sleeps, one that is stopped, and what two ranks find from beats."""

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from tests.train.torchrun import torchrun
from train.lifetime.watch import Beat, RankWatch, Seen, find

WORKER = str(Path(__file__).with_name("worker.py"))
LIMIT = 6.0
BEAT = Beat(1, "train", "stage train, step 3", None, 5, "  loop.py:1 in train", 10, "host")
SILENCE = 10.0


def seen(*beats: Beat | None, at: float = 0.0) -> list[Seen]:
    found = [Seen(at) for _ in beats]
    for one, beat in zip(found, beats, strict=True):
        if beat is not None:
            one.update(beat, at)
    return found


def test_the_rank_that_has_begun_fewer_operations_hangs() -> None:
    late = replace(BEAT, operations=4)
    ranks = seen(BEAT, late, BEAT)
    for rank, beat in enumerate((BEAT, late, BEAT)):
        ranks[rank].update(replace(beat, number=2, stack="  other.py:2 in work"), 90.0)
    [found] = find(ranks, 95.0, SILENCE)
    assert (found.rank, found.seconds, found.ends_run) == (1, 95.0, True)
    # It comes to the next step: everything is well.
    ranks[1].update(replace(late, number=3, operations=5), 96.0)
    assert find(ranks, 97.0, SILENCE) == []
    assert ranks[1].advanced == 96.0


def test_ranks_that_all_compute_do_not_hang() -> None:
    ranks = seen(BEAT, BEAT)
    for rank in ranks:
        rank.update(replace(BEAT, number=2), 5000.0)
    assert find(ranks, 5001.0, SILENCE) == []


def test_ranks_that_all_wait_in_operations_hang() -> None:
    waiting = replace(BEAT, operation="broadcast")
    ranks = seen(waiting, replace(waiting, operation="all_reduce"))
    assert find(seen(waiting, BEAT), 95.0, SILENCE * 10) == []
    ranks[1].update(replace(waiting, number=2, operation="all_reduce", stack="  other.py:2 in work"), 5.0)
    [found] = find(ranks, 95.0, SILENCE * 10)
    assert (found.rank, found.seconds, found.ends_run) == (1, 90.0, True)
    assert found.what.startswith("waits in all_reduce, ")
    ranks[0].update(replace(waiting, number=2, operations=6), 96.0)
    assert "waits in" not in find(ranks, 97.0, SILENCE * 10)[0].what


def test_a_silent_rank_hangs_and_one_that_has_ended_does_not() -> None:
    ranks = seen(BEAT, BEAT, replace(BEAT, ended=True, operations=0), None)
    ranks[0].update(replace(BEAT, number=2), 60.0)
    silent, missing = find(ranks, 60.0, SILENCE)
    assert (silent.rank, silent.seconds, silent.ends_run) == (1, 60.0, True)
    assert (missing.rank, missing.ends_run) == (3, False)


def test_a_rank_at_work_while_others_wait_does_not_end_the_run() -> None:
    ranks = seen(BEAT, replace(BEAT, waits_for="stages/train/opened"))
    for rank in ranks:
        assert rank.beat is not None
        rank.update(replace(rank.beat, number=2), 5000.0)
    [found] = find(ranks, 5001.0, SILENCE)
    assert (found.rank, found.seconds, found.ends_run) == (0, 5001.0, False)


def test_a_suspended_job_continues(tmp_path: Path) -> None:
    """The time in which the watch did not run does not count."""
    store = dist.HashStore()

    def never(_: str) -> int:
        raise AssertionError

    def watch(rank: int) -> RankWatch:
        return RankWatch(store, rank, 2, limit_seconds=60.0, directory=tmp_path, stop=never, fail=never)

    suspended, other = watch(0), watch(1)
    other._beat()
    suspended._look()
    for seen in suspended._seen:
        seen.beaten, seen.advanced, seen.moved = (
            one - 3600 for one in (seen.beaten, seen.advanced, seen.moved)
        )
    suspended._looked -= 3600
    suspended._look()
    assert not store.check(["watch/hung"])
    suspended._seen[1].beaten -= 3600  # it did run
    suspended._look()
    assert store.get("watch/hung").decode().startswith("0 rank 1 (process ")


def test_a_rank_that_sleeps_is_named_with_its_stack_and_all_ranks_end(tmp_path: Path) -> None:
    printed = torchrun(WORKER, str(LIMIT), str(tmp_path), num_processes=2, check=False, seconds=60)
    assert "rank 0: stop: a test" in printed
    assert "rank 1: stop" not in printed
    warned, _, ended = printed.partition("error: ")
    assert "note: rank 1 (process " in warned
    assert "has not moved while others wait for " in warned
    first = ended.splitlines()[0]
    assert first.startswith("Rank 1 (process ")
    assert " has held up the other ranks for " in first
    assert " s, in stage train, step 3; last seen at" in first
    assert "tests/train/lifetime/worker.py:" in ended
    assert " in sleep_here\n" in ended
    for rank in range(2):
        message = (tmp_path / f"failed-{rank}").read_text()
        assert message.startswith("Rank 1 (process ")
        stacks = (tmp_path / "hung" / f"rank-{rank}.txt").read_text()
        assert ("sleep_here" in stacks.partition("Thread")[2]) == (rank == 1)


def test_ranks_that_wait_for_each_other_are_named_with_their_stacks(tmp_path: Path) -> None:
    """The time-out of gloo would come a minute later."""
    printed = torchrun(WORKER, str(LIMIT), str(tmp_path), "crossed", num_processes=2, check=False, seconds=60)
    first = printed.partition("error: ")[2].splitlines()[0]
    assert " waits in broadcast, as all other ranks wait in an operation, for " in first
    assert " s, in stage train, step 3; last seen at" in first
    for rank in range(2):
        assert "broadcast" in (tmp_path / "hung" / f"rank-{rank}.txt").read_text()
