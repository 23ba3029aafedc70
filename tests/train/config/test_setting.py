"""Every number of the recipe, at values that hardly any setting has: it means something, or is refused."""

import copy
import math
import typing
from functools import cache, reduce
from typing import Any

import pytest

from eagle31.errors import UserError
from tests.train.torchrun import composed
from train.config.compose import schema_keys
from train.config.run import RunConfig, check
from train.config.setting import check_settings

WORDS: dict[object, tuple[float, ...]] = {
    int: (0, -1, 10**30, -(10**30)),
    float: (0.0, -1.0, math.nan, math.inf, -math.inf, 1e30, -1e30),
}
# Where 0 has a meaning (off, none, all, or the first); see docs/configuration.md.
ZERO = {
    *(
        "seed",
        "train.seed",
        "data.regenerate.temperature",
        "data.template_probability",
    ),
    "data.max_malformed_fraction",
    *(
        "optim.warmup_fraction",
        "deepspeed.zero_stage",
        "drafter.aux_layer_ids",
        "drafter.mask_token_id",
        "drafter.markov_rank",
    ),
}


@cache
def recipe() -> RunConfig:
    return composed("any_target", "target.model=a/b", "data.train=c.jsonl")


def numbers() -> list[tuple[str, object, bool]]:
    """Return every key of the schema that is a number, its type, and whether it is a list of them."""
    found = []
    for key, kind in schema_keys():
        listed = next((one for one in (kind, *typing.get_args(kind)) if typing.get_origin(one) is list), None)
        members = typing.get_args(listed or kind) or (kind,)
        found += [(key, one, listed is not None) for one in members if one in WORDS]
    return found


@pytest.mark.parametrize(("key", "kind", "is_list"), numbers(), ids=str)
def test_a_number_means_something_or_is_refused_by_name(key: str, kind: object, is_list: bool) -> None:
    config = copy.deepcopy(recipe())
    *groups, name = key.split(".")
    owner: Any = reduce(getattr, groups, config)
    for word in WORDS[kind]:
        setattr(owner, name, [word] if is_list else word)
        if word == 0 and key in ZERO:
            check_settings(config)
            continue
        with pytest.raises(UserError) as caught:
            check(config)
        assert caught.value.field == key, word
        assert caught.value.remedy.endswith(".")


@pytest.mark.parametrize(
    ("argument", "field"),
    [
        ("data.sources.a={source: b, weight: 0}", "data.sources.a.weight"),
        ("train.step_decay=1.01", "train.step_decay"),
        ("output_dir=' '", "output_dir"),
        ("data.eval=", "data.eval"),
    ],
)
def test_bounds_of_members_and_ends_of_ranges_and_empty_texts(argument: str, field: str) -> None:
    with pytest.raises(UserError) as caught:
        check(composed("any_target", "target.model=a/b", "data.train=c.jsonl", argument))
    assert caught.value.field == field
