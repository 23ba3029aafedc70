"""The training loop's step on a GPU: from the rows of the loader to the weights that DeepSpeed updates."""

import json
from pathlib import Path

from tests.train.torchrun import torchrun


def test_an_optimizer_step_never_waits(tmp_path: Path) -> None:
    file = tmp_path / "waits.json"
    torchrun("tests/pretended_gpu/engine_worker.py", str(file))
    assert json.loads(file.read_text()) == {"0": [], "1": [], "2": []}
