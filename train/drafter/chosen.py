"""The drafter that a run trains: the recipe's shape, completed by the target and by `drafter.init_from`."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from data.target.aux_layers import check_aux_layer_ids, default_aux_layer_ids
from data.target.checkpoint import Checkpoint
from eagle31.export.read import LoadedExport
from eagle31.model.config import DrafterConfig
from train.config.drafter import DrafterShape
from train.drafter.published import (
    fetch_checkpoint,
    open_published,
    starting_config,
    starting_ids,
    starting_notes,
)
from train.drafter.shape import complete_shape
from train.target import Target


@dataclass
class ChosenDrafter:
    """The drafter that the settings describe. What is expensive is made at first use and kept."""

    settings: DrafterShape
    target: Target
    announced: bool = False  # whether what changes in the checkpoint to start from is printed

    @cached_property
    def initial(self) -> LoadedExport | None:
        """The checkpoint in `drafter.init_from`, in float32 on the CPU."""
        directory = self._initial_directory
        if directory is None:
            return None
        ids = starting_ids(directory, self.settings.aux_layer_ids)
        return open_published(directory, self.target.parts, ids, "drafter.init_from")

    @cached_property
    def initial_fingerprint(self) -> str | None:
        """The fingerprint of the weights in `drafter.init_from`."""
        directory = self._initial_directory
        if directory is None:
            return None
        return Checkpoint(str(directory.resolve())).fingerprint()

    @cached_property
    def aux_layer_ids(self) -> tuple[int, ...]:
        if self._started is not None:
            return self._started.aux_layer_ids
        ids, num_layers = self.settings.aux_layer_ids, self.target.parts.num_layers
        return default_aux_layer_ids(num_layers) if ids is None else check_aux_layer_ids(ids, num_layers)

    def config(self, draft_vocab_size: int | None = None) -> DrafterConfig:
        """Return the complete configuration: that of the checkpoint in `drafter.init_from`, or the recipe's
        values, else the target's.

        Args:
            draft_vocab_size: None for the recipe's, or the target's vocabulary.

        Raises:
            UserError: recipe and checkpoint contradict each other, or the checkpoint is for another target.
        """
        if self._started is not None:
            return self._started
        parts = self.target.parts
        size = draft_vocab_size or self.settings.draft_vocab_size or parts.vocab_size
        return complete_shape(self.settings, parts.config, self.aux_layer_ids, parts.vocab_size, size)

    @cached_property
    def _started(self) -> DrafterConfig | None:
        """The configuration of the drafter that starts from a checkpoint."""
        if self.initial is None:
            return None
        text_config = self.target.parts.config.get_text_config()
        config = starting_config(self.settings, self.initial.drafter.config, text_config)
        if self.announced:
            for note in starting_notes(config, self.initial, self.target.parts):
                print(f"init_from: {note}")
        return config

    @cached_property
    def _initial_directory(self) -> Path | None:
        if self.settings.init_from is None:
            return None
        return fetch_checkpoint(self.settings.init_from, self.settings.init_revision, "drafter.init_from")
