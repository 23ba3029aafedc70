"""A run whose samples are recorded: `REFERENCE RECORDS SETTING...`, or `- - SETTING...` to record none.

REFERENCE is the output directory of an offline capture of the same samples. For every read of samples,
RECORDS gets a line with their indices and the largest difference of their states from the reference's.
"""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from data.capture.online import OnlineStates
from data.samples import CapturedSample
from data.store import HiddenStateStore
from eagle31.json_files import append_jsonl
from train.bench.capture_load.client import difference

_MAIN = Path(__file__).resolve().parents[2] / "main.py"


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

    OnlineStates.get_many = get_many  # type: ignore[method-assign, assignment]  # the run itself stays as it is


def main() -> None:
    reference, records, *settings = sys.argv[3:]
    if reference != "-":
        record_samples(Path(reference), Path(records))
    sys.argv = [str(_MAIN), *settings]
    runpy.run_path(str(_MAIN), run_name="__main__")


if __name__ == "__main__":
    main()
