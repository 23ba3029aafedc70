"""A run's sources of conversations by name, and what its data depends on because of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.conversations.mixing import Mixture, Share
from data.conversations.preformatted import SplitText
from data.conversations.reading import Source
from train.config.compose import CHECKOUT
from train.config.data import SELF, DataConfig, SourceConfig
from train.config.run import RunConfig
from train.evaluation.matrix import parse_sources, prompt_source

TRAIN, EVAL, _SETS = "data.train", "data.eval", "data.evaluation_sets"  # the sources with these keys

# The path of "embedded" for training or evaluation, and of "self"; other sources as they are.
Located = Callable[[str, bool], str]


def training_sources(data: DataConfig, located: Located) -> dict[str, Source]:
    """Return the sources of training conversations by name; a single one is called data.train."""
    if data.train == SELF:  # the columns are those of data.eval
        data = replace(data, prompt_column=None, response_column=None)

    def source(location: str, field: str, one: DataConfig | SourceConfig) -> Source:
        return Source(
            located(location, False),
            field,
            one.split,
            one.subset,
            one.prompt_column,
            one.response_column,
            require_answer=not data.regenerate.enabled,
            revision=one.revision,
            max_malformed_fraction=data.max_malformed_fraction,
        )

    if data.train is not None:
        return {TRAIN: source(data.train, TRAIN, data)}
    return {
        name: source(one.source, f"data.sources.{name}.source", one) for name, one in data.sources.items()
    }


def evaluation_source(data: DataConfig, located: Located) -> Source | None:
    """Return the source of the held-out prompts, or None if they are held out of the training sources."""
    if data.eval is None:
        return None
    columns = (data.prompt_column, data.response_column)
    return Source(
        located(data.eval, True),
        EVAL,
        data.eval_split,
        data.subset,
        *columns,
        require_answer=False,
        revision=data.eval_revision,
        max_malformed_fraction=data.max_malformed_fraction,
    )


def evaluation_sets(data: DataConfig) -> dict[str, Source]:
    """Return the further sets by name whose prompts are left out of training."""
    listed = data.evaluation_sets
    if listed is None:
        return {}
    if listed.endswith(".yaml") and not Path(listed).exists():
        listed = str(CHECKOUT / listed)  # as recipes name it, wherever the run starts
    sets = parse_sources([listed], prompt_source(_SETS))
    limit = data.max_malformed_fraction
    return {name: replace(one, max_malformed_fraction=limit) for name, one in sets.items()}


def mixture_of(config: RunConfig, located: Located, split_text: SplitText) -> Mixture:
    """Return the sources of a run and how conversations are chosen among theirs."""
    data = config.data
    shares = {name: Share(one.weight, one.max_conversations) for name, one in data.sources.items()}
    return Mixture(
        training_sources(data, located),
        data.num_validation + data.num_test,
        config.seed,
        shares,
        evaluation_source(data, located),
        evaluation_sets(data),
        data.near_duplicates,
        not data.regenerate.enabled,
        split_text,
    )


def source_inputs(config: RunConfig, located: Located, written: dict[str, Any] | None = None) -> Any:
    """Return what the conversations depend on from which prompts are held out.

    Args:
        written: what the prompts depend on that the target writes itself, with data.train=self.
    """
    data = config.data
    sources = training_sources(data, located)
    if written is not None:
        found: Any = written
    elif data.train is not None:
        found = sources[TRAIN].fingerprint()
    else:
        found = {name: [one.fingerprint(), *one.columns] for name, one in sources.items()}
    screening: dict[str, Any] = {"regenerated": True} if data.regenerate.enabled else {}
    if data.near_duplicates is not None:
        screening["near_duplicates"] = data.near_duplicates
    if sets := evaluation_sets(data):
        screening["evaluation_sets"] = {name: [one.fingerprint(), *one.columns] for name, one in sets.items()}
    return {"sources": found} | screening if screening else found


def share_inputs(data: DataConfig) -> dict[str, Any]:
    """Return what the choice among several sources depends on; nothing where all of them are used."""
    shares = {name: [one.weight, one.max_conversations] for name, one in data.sources.items()}
    return {"shares": shares} if any(share != [None, None] for share in shares.values()) else {}
