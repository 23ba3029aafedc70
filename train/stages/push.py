"""The push stage: uploads the export to the Hugging Face Hub. Rank 0 runs it."""

from pathlib import Path

from train.config.export import HubConfig
from train.reporting.hub import commit_message, prepare_upload, push


def push_run(output_dir: Path, hub: HubConfig) -> str:
    """Push a run's export and report; return the commit's URL."""
    return push(prepare_upload(output_dir, hub), hub, commit_message(output_dir))
