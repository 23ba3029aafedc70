from pathlib import Path

import pytest

from train.bench.store.simulation import (
    Scale,
    measure_everywhere,
    measure_finishing,
    measure_starts,
    write_store,
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE31_CACHE", str(tmp_path / "cache"))


def test_a_small_store_is_finished_opened_and_read(tmp_path: Path) -> None:
    scale = Scale(num_samples=900, num_shards=300, num_ranks=6, num_processes=2, num_reads=50)
    write_store(tmp_path, scale)
    finishing = measure_finishing(tmp_path, scale)
    assert finishing.first_look_seconds > 0
    assert (tmp_path / "manifest.json").exists()
    starts = measure_starts(tmp_path, scale)
    assert len(starts) == 2
    for start in starts:
        # The index, the manifest, and no shard.
        assert 0 < start.read_mb < 0.2
        assert start.sample_milliseconds > 0
    everywhere = measure_everywhere(tmp_path)
    assert (everywhere.num_shards, everywhere.mappings, everywhere.error) == (300, 0, "")
    assert everywhere.open_files < 250  # 128 shards, and what the process had open
