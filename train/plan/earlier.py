"""What earlier runs have left that a run with these settings would take."""

import os
from dataclasses import asdict
from pathlib import Path

from eagle31.json_files import read_json, write_json
from train.artifact import artifacts_dir, fingerprint
from train.config.run import RunConfig, Stage

_SETTINGS = "settings.json"  # in the directory of a result
# The groups of settings on which no result of a training depends.
_NOT_OF_TRAINING = (
    "output_dir",
    "artifacts_dir",
    "stages",
    "plan",
    "export",
    "evaluate",
    "vllm",
    "torchspec",
)


def settings_of(config: RunConfig, stage: Stage) -> str:
    """Return a fingerprint of the settings of a stage and of those before it.

    It is known before data or weights are read. Results of which it is the same are those of the same run,
    unless a file has another content.
    """
    config_of = asdict(config)
    known = {name: config_of[name] for name in ("seed", "target", "data")}
    if stage is not Stage.data:
        known["states"] = [config.capture.codec, config.capture.source, config.capture.mode]
        known["states"] += [config.drafter.aux_layer_ids, config.evaluate.max_new_tokens]
    if stage not in (Stage.data, Stage.capture):
        known |= {name: value for name, value in config_of.items() if name not in _NOT_OF_TRAINING}
    return fingerprint(known)


def note_settings(config: RunConfig, stage: Stage, directory: Path) -> None:
    """Write down which settings a result is for; the last ones, where it is for several."""
    path, settings = directory / _SETTINGS, settings_of(config, stage)
    if not path.exists() or read_json(path) != settings:
        write_json(path, settings)


def made_with(config: RunConfig, stage: Stage) -> list[Path]:
    """Return the directories of a stage's results with the same settings; the newest is the last."""
    settings = settings_of(config, stage)
    notes = artifacts_dir(config).glob(f"{stage.value}-*/{_SETTINGS}")
    return [path.parent for path in sorted(notes, key=os.path.getmtime) if read_json(path) == settings]
