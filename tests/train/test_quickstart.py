"""The quickstart as a user types it, made small."""

import os
import re
import subprocess
import sys
from pathlib import Path

from data.embedded.corpus import standard_library
from data.embedded.target import EmbeddedTarget, TargetSettings, fingerprint
from eagle31.json_files import read_json
from tests.train.torchrun import ROOT, RUN_SECONDS, environment

STEPS = 12
SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings")


def test_quickstart_exports_a_drafter_and_prints_what_it_gains(
    small_target: EmbeddedTarget, tmp_path: Path
) -> None:
    # A trained small target takes the place of the embedded one, which takes minutes to train.
    embedded = tmp_path / "cache" / "embedded"
    embedded.mkdir(parents=True)
    (embedded / fingerprint(standard_library(), TargetSettings())).symlink_to(small_target.model.parent)
    shape = read_json(small_target.model / "config.json")
    small = [f"target.architecture.{name}={shape[name]}" for name in SHAPE]
    small += ["drafter.draft_vocab_size=300", "data.max_tokens=192", "data.num_validation=6"]
    small += ["data.num_test=4", "train.row_tokens=256", f"train.max_steps={STEPS}", "capture.max_samples=60"]
    small += ["train.validate_every=6", "evaluate.max_new_tokens=32"]
    small += [f"cache_dir={tmp_path / 'cache'}", f"output_dir={tmp_path / 'run'}"]
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [ROOT / "scripts" / "quickstart", *small],
        cwd=tmp_path,
        env=environment() | {"EAGLE31_NO_VENV": "1", "PATH": programs},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_SECONDS,
    )
    assert done.returncode == 0, done.stdout
    _, heading, table = done.stdout.partition("acceptance length")
    row = re.search(r"^trained +4 +0 +(\d+\.\d+) ", table, re.MULTILINE)
    assert heading, done.stdout
    assert row, done.stdout
    assert float(row[1]) >= 1
    assert read_json(tmp_path / "run" / "export" / "config.json")["norm_output"] is True
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()
    assert (tmp_path / "run" / "report" / "index.html").is_file()
    [curve] = (tmp_path / "run" / "artifacts").glob("train-*/metrics.jsonl")
    assert f'"step": {STEPS},' in curve.read_text()
