import json
import runpy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from data.store import HiddenStateStore
from data.store.codec import Encoding
from data.target.spec import TargetSpec
from tests.data.target.tiny_target import HIDDEN_SIZE, make_dataset, save_target
from train.bench.capture import sources
from train.bench.capture.timing import PREFILL, RunSide, Task, Timing, sizes, summary, time_rounds

SCRIPT = Path(__file__).parents[4] / "scripts" / "bench" / "capture"


def task(directory: Path) -> Task:
    return Task(
        spec=save_target(directory / "target"),
        aux_layer_ids=(0, 2, 5),
        dataset=make_dataset(),
        encodings=(Encoding(), Encoding("fp8")),
        batch_tokens=48,
        shard_tokens=40,
        scratch=directory,
    )


def test_sides_take_turns_in_both_orders(tmp_path: Path) -> None:
    ran: list[str] = []

    @contextmanager
    def open_source(task: Task) -> Iterator[Mapping[str, RunSide]]:
        def side(name: str) -> RunSide:
            return lambda: ran.append(name) or Timing(1.0, 2.0)  # type: ignore[func-returns-value]

        yield {name: side(name) for name in (PREFILL, "exact")}
        ran.append("closed")

    turns = Task(TargetSpec("t"), (0,), make_dataset(), (), 1, 1, tmp_path)
    timings = time_rounds(open_source, turns, rounds=2, note=lambda _: None)
    assert ran == [PREFILL, "exact", PREFILL, "exact", "exact", PREFILL, "closed"]
    assert timings == {name: [Timing(1.0, 2.0)] * 2 for name in (PREFILL, "exact")}


def test_ratios_are_taken_within_rounds() -> None:
    prefill_rounds = [Timing(1.0, 1.0), Timing(2.0, 2.0), Timing(4.0, 4.0)]
    capture_rounds = [Timing(2.0, 1.25), Timing(4.0, 2.5), Timing(4.0, 5.0)]
    prefill, capture = summary({PREFILL: prefill_rounds, "exact": capture_rounds}, num_tokens=100)
    assert (prefill["tokens_per_second"], prefill["of_prefill"]) == (50.0, 1.0)
    assert (capture["tokens_per_second"], capture["of_prefill"]) == (25.0, 0.5)
    assert capture["of_prefill_cpu"] == 0.8


def test_all_sides_run_the_same_batches_and_only_capture_writes_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[list] = []
    stores: list[int] = []
    real_remove = sources.shutil.rmtree

    def keep_count(directory: Path) -> None:
        stores.append(len(HiddenStateStore(directory)))
        real_remove(directory)

    monkeypatch.setattr(sources.shutil, "rmtree", keep_count)
    with sources.open_hf(task(tmp_path)) as sides:
        decoder = sides[PREFILL].args[1].modules.decoder  # type: ignore[attr-defined]
        decoder.register_forward_pre_hook(
            lambda _, args, kwargs: batches.append(kwargs["input_ids"].tolist()), with_kwargs=True
        )
        for name in (PREFILL, "exact", "fp8"):
            timing = sides[name]()
            assert timing.wall_seconds > 0
    num_batches = len(batches) // 3
    assert batches[:num_batches] == batches[num_batches : 2 * num_batches] == batches[2 * num_batches :]
    assert stores == [12, 12]


def test_sizes_match_a_store() -> None:
    dataset = make_dataset()  # two tokens of a prompt, then the answer
    tokens = sum(len(ids) for ids in dataset["input_ids"])
    by_name = {(x["codec"], x["final_states"]): x for x in sizes(dataset, 3, HIDDEN_SIZE, torch.float32)}
    assert by_name["exact", "all"]["bytes_per_token"] == 4 * HIDDEN_SIZE * 4 + 5
    assert by_name["bf16", "all"]["of_bf16"] == 1
    assert by_name["fp8", "all"]["bytes_per_token"] == 4 * (HIDDEN_SIZE + 1) + 5
    # Supervised: the answers without their last tokens; keys up to the token before.
    rows = sum(max(len(ids) - 3, 0) for ids in dataset["input_ids"])
    keys = sum(max(len(ids) - 2, 0) for ids in dataset["input_ids"] if len(ids) > 3)
    supervised = (3 * keys + rows) * (HIDDEN_SIZE + 1) / tokens + 5
    assert by_name["fp8", "supervised"]["bytes_per_token"] == pytest.approx(supervised)


def test_command_prints_and_writes_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    spec = save_target(tmp_path / "target")
    options = ["--max-samples", "6", "--rounds", "1", "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["bench/capture", spec.model, *options])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "6 samples" in capsys.readouterr().out
    written = json.loads((tmp_path / "out.json").read_text())
    assert [side["side"] for side in written["sides"]] == [PREFILL, "exact"]
    assert len(written["encodings"]) == 6
