"""The push stage. Rank 0 runs it."""

from pathlib import Path

from train.config.export import HubConfig
from train.reporting.hub import commit_message, prepare_upload, push


def push_run(output_dir: Path, hub: HubConfig) -> str:
    """Pushes what a run has exported and reported; returns the commit's URL."""
    return push(prepare_upload(output_dir, hub), hub, commit_message(output_dir))
