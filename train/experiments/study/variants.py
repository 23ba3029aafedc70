"""The variants of the drafter and of its training that the study compares."""

from collections.abc import Sequence
from dataclasses import dataclass

from train.experiments.quality.sides import Side, chosen, named_overrides

REFERENCE = "eagle3"
_DATA_KEYS = ("data.", "capture.")


@dataclass(frozen=True)
class Variant:
    """A trained drafter that differs from the others in its settings."""

    name: str
    overrides: tuple[str, ...]  # of the recipe

    @property
    def side(self) -> Side:
        """What is trained, for the runner of experiments/quality."""
        return Side(self.name, tuple(one for one in self.overrides if not one.startswith(_DATA_KEYS)))

    @property
    def data(self) -> tuple[str, ...]:
        """The overrides that change the training data, so that the target has to be captured again."""
        return tuple(one for one in self.overrides if one.startswith(_DATA_KEYS))


# One norm at a time between EAGLE 3 and EAGLE 3.1.
DRAFTERS = (
    Variant(REFERENCE, ("drafter=eagle3",)),
    Variant("fc_norm", ("drafter.fc_norm=true", "drafter.norm_output=false")),
    Variant("norm_output", ("drafter.fc_norm=false", "drafter.norm_output=true")),
    Variant("eagle3.1", ("drafter=eagle31",)),
    Variant("norm_before_residual", ("drafter=eagle31", "drafter.norm_before_residual=true")),
)
# EAGLE 3.1 with one option for robustness each.
TRAININGS = (
    Variant("templates", ("data.augment.template_probability=0.3",)),
    Variant("systems", ("data.augment.system_probability=0.3",)),
    Variant("documents", ("data.augment.documents_probability=0.3", "data.augment.documents_tokens=256")),
    Variant("position_gaps", ("train.position_gap_probability=0.3", "train.position_gap_tokens=512")),
    Variant("window", ("drafter.sliding_window=128",)),
)


def chosen_variants(names: Sequence[str], further: Sequence[str]) -> list[Variant]:
    """Return the variants of --variants and --variant.

    Args:
        names: names of `DRAFTERS` and `TRAININGS`.
        further: NAME=OVERRIDES, with any number of overrides of the recipe.

    Raises:
        UserError: a name is unknown, or there are two variants of one name, or none.
    """
    known = {variant.name: variant for variant in (*DRAFTERS, *TRAININGS)}
    return chosen("variant", known, names, further, parse_variant)


def parse_variant(text: str) -> Variant:
    """Parse NAME=OVERRIDES, such as `deep=drafter.num_hidden_layers=2 train.ttt_steps=6`.

    Raises:
        UserError: it has no name that can be that of a directory, or no override.
    """
    return Variant(*named_overrides("--variant", text, example="deep=drafter.num_hidden_layers=2"))
