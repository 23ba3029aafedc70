from pathlib import Path

from data.store.codec import Encoding
from train.bench.capture.state_writing import Workload, compare


def test_both_sides_write_as_many_bytes_and_leave_nothing(tmp_path: Path) -> None:
    work = Workload(
        num_samples=6,
        num_tokens=40,
        num_layers=3,
        hidden_size=64,
        encoding=Encoding("exact", "all"),
        shard_tokens=100,
        staging_bytes=1 << 16,
    )
    result = compare(work, tmp_path, rounds=2)
    assert len(result["rounds"]) == 2
    states = 6 * 40 * 3 * 64 * 2 / 1e9
    assert states < result["capture"]["gb"] == result["plain"]["gb"] < 1.2 * states
    assert {"crc32", "sha256"} <= result["checksums_gb_per_cpu_second"].keys()
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".lock"]
