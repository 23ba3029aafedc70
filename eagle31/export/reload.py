"""Drafts on an export's probe in a new process that has only the files."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

import eagle31
from eagle31.errors import UserError
from eagle31.export.read import load_export
from eagle31.export.verification import Difference, read_probe, replay_probe


def reload_in_fresh_process(export: Path) -> Difference:
    """Load the export and draft on its probe in a new process.

    Raises:
        UserError: the process failed; the message has its last line.
    """
    root = str(Path(eagle31.__file__).resolve().parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "eagle31.export.reload", str(Path(export).resolve())],
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last_line = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UserError("reload", export, f"A new process cannot draft with it: {last_line}")
    return Difference(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    directory = Path(sys.argv[1])
    loaded = load_export(directory, torch.device("cpu"), torch.float32)
    probe = read_probe(directory)
    assert probe is not None
    print(json.dumps(asdict(replay_probe(probe, loaded.drafter, loaded.embed_tokens))))


if __name__ == "__main__":
    main()
