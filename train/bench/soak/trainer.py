"""A run whose samples are recorded: `REFERENCE RECORDS SETTING...`, or `- - SETTING...` to record none.

REFERENCE is the output directory of an offline capture of the same samples. For every read of samples,
RECORDS gets a line with their indices and the largest difference of their states from the reference's.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from data.capture.online import OnlineStates
from data.samples import CapturedSample
from data.store import HiddenStateStore
from eagle31.json_files import append_jsonl
from train.bench.capture_load.client import difference
from train.command import run_command
from train.compose import composed
from train.distributed import World
from train.main import run


def record_samples(reference: Path, records: Path) -> None:
    """Have every read of online samples append a line to `records`."""
    [directory] = reference.glob("artifacts/capture-*/train")
    store = HiddenStateStore(directory)
    read = OnlineStates.get_many

    def get_many(source: OnlineStates, indices: Sequence[int]) -> list[CapturedSample]:
        samples = read(source, indices)
        largest = max(difference(one, store[index]) for index, one in zip(indices, samples, strict=True))
        append_jsonl(records, {"samples": list(map(int, indices)), "difference": largest})
        return samples

    OnlineStates.get_many = get_many  # type: ignore[method-assign]  # the run itself stays as it is


def main() -> None:
    reference, records, *settings = sys.argv[3:]
    if reference != "-":
        record_samples(Path(reference), Path(records))
    run(composed(settings), World.from_environment())


if __name__ == "__main__":
    run_command(main)
