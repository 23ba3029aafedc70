"""The reload of an export in the test's own process."""

from pathlib import Path

import torch

from eagle31.export.read import load_export
from eagle31.export.verification import Difference, read_probe, replay_probe


def reload_in_this_process(export: Path) -> Difference:
    """Return what `reload_in_fresh_process` does, without the seconds that a process takes to start."""
    loaded, probe = load_export(export, torch.device("cpu")), read_probe(export)
    assert probe is not None
    return replay_probe(probe, loaded.drafter, loaded.embed_tokens)
