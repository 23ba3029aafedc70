"""Whether training waits for its data: steps per second from a store, and from online capture."""

import tempfile
from pathlib import Path

from data.store.codec import Encoding
from train.bench.delivery.timing import compare
from train.bench.gpu_check.record import Options, Record

SLOWEST = 0.8  # online of offline


def run(options: Options, record: Record) -> None:
    with tempfile.TemporaryDirectory() as directory:
        result = compare(
            Path(directory),
            rounds=1 if options.dry_run else 5,
            num_steps=3 if options.dry_run else 20,
            encoding=Encoding(),
            spool_dir=None,
            spool_gb=0.5,
        )
    for side in ("offline", "online"):
        record.figure(f"steps per second, {side}", round(result[side]["steps_per_second"], 2))
        record.figure(f"waiting for data, {side}", f"{result[side]['data_wait_fraction']:.1%}")
    ratio = result["online_of_offline"]
    record.figure("online of offline", f"{ratio:.1%}")
    if not options.dry_run:  # so few steps on a shared machine measure the machine
        record.check("online capture keeps up", ratio >= SLOWEST, f"{ratio:.1%}; bound {SLOWEST:.0%}")
