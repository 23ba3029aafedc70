"""Every number of the recipe, at values that hardly any setting has: it means something, or is refused."""

import copy
import math
import typing
from functools import reduce
from typing import Any

import pytest

from eagle31.errors import UserError
from tests.bad_input.commands import Case, CheckCase, each
from tests.train.torchrun import composed
from train.config.overrides import schema_types
from train.config.run import check

NEEDED = ("recipe=any_target", "target.model=a/b", "data.train=c.jsonl")
HUGE = 10**30
WORDS = {int: (0, -1, HUGE, -HUGE), float: (0.0, -1.0, math.nan, math.inf, -math.inf, 1e30, -1e30)}
# What 0 and -1 mean where they are allowed; see docs/configuration.md.
MEANINGS: dict[str, set[float]] = {
    "data.max_malformed_fraction": {0},  # no row
    "data.regenerate.temperature": {0},  # greedy
    "data.regenerate.top_k": {0},  # all tokens
    "data.augment.template_probability": {0},  # off, as the next ones
    "data.augment.system_probability": {0},
    "data.augment.documents_probability": {0},
    "capture.max_refused_fraction": {0},  # no sample
    "optim.momentum": {0},  # the gradient alone
    "optim.weight_decay": {0},
    "optim.warmup_fraction": {0},
    "optim.warmup_steps": {0},
    "optim.min_lr_fraction": {0},
    "optim.head_start_fraction": {0},
    "deepspeed.zero_stage": {0},
    "train.ttt_curriculum_fraction": {0},
    "train.reach_smoothing": {0},
    "train.lk_eta": {0},
    "train.position_gap_probability": {0},
    "train.diagnose_every": {0},  # never
    "train.seed": {0},
    "launcher.gpus_per_node": {0},  # a CPU run
    "launcher.capture_nodes": {0},
    "launcher.max_requeues": {0},  # never requeued
    "seed": {0},
}


def numbers() -> list[tuple[str, type, bool]]:
    """Return every key of the schema that is a number, its type, and whether it is a list of them."""
    found = []
    for key, kind in schema_types().items():
        members = [one for one in (typing.get_args(kind) or (kind,)) if one in WORDS]
        found += [(key, one, typing.get_origin(kind) is list) for one in members]
    return found


def test_the_walk_finds_the_numbers_of_every_group() -> None:
    groups = {key.split(".")[0] for key, _, _ in numbers()}
    assert groups >= {"target", "drafter", "data", "capture", "vllm", "optim", "deepspeed", "train"}
    assert groups >= {"evaluate", "plan", "launcher", "seed"}
    assert {key for key, _, _ in numbers()} >= set(MEANINGS), "a key that is gone"


@pytest.mark.parametrize(("key", "kind", "is_list"), numbers(), ids=lambda value: str(value))
def test_a_number_means_something_or_is_refused_by_name(key: str, kind: type, is_list: bool) -> None:
    config = copy.deepcopy(composed("any_target", *NEEDED[1:]))
    *groups, name = key.split(".")
    owner: Any = reduce(getattr, groups, config)
    for word in WORDS[kind]:
        setattr(owner, name, [word] if is_list else word)
        if word in MEANINGS.get(key, ()):
            check(config)
            continue
        with pytest.raises(UserError) as caught:
            check(config)
        assert caught.value.field == key, word
        assert caught.value.remedy.endswith(".")


@pytest.mark.parametrize("key", [key for key, kind, is_list in numbers() if kind is int and not is_list][::9])
def test_a_whole_number_has_no_fraction_and_no_exponent(key: str, check_case: CheckCase) -> None:
    for word in ("1e30", "1.5", "nan", "many", "''"):
        check_case(Case("", (*NEEDED, f"{key}={word}"), (f"error: {key}={word}: ", "Give a whole number")))


def of(key: str, word: str, *says: str) -> Case:
    """Return a case of one setting on the command line."""
    return Case(f"{key}={word}", (*NEEDED, f"{key}={word}"), (f"error: {key}=", *says), absent=("target ",))


CASES = [
    of("drafter.hidden_size", "0", "It must be at least 1"),
    of("drafter.num_key_value_heads", "0", "It must be at least 1"),
    of("drafter.intermediate_size", "0", "It must be at least 1"),
    of("drafter.max_position_embeddings", "0", "It must be at least 1"),
    of("drafter.draft_vocab_size", "0", "It must be at least 1"),
    of("drafter.num_hidden_layers", "1000", "It must be at most 64"),
    of("drafter.rms_norm_eps", "nan", "finite"),
    of("drafter.rms_norm_eps", "0", "(0, 1)"),
    of("drafter.rope_parameters.rope_theta", "nan", "finite"),
    of("drafter.aux_layer_ids", "[]", "distinct ids in increasing order"),
    of("drafter.aux_layer_ids", "[-1,2,3]", "distinct ids in increasing order"),
    of("drafter.aux_layer_ids", "[3,2,1]", "distinct ids in increasing order"),
    of("drafter.aux_layer_ids", "[1,2,2]", "distinct ids in increasing order"),
    of("train.ttt_steps", "5000", "It must be at most 64"),
    of("evaluate.draft_tokens", "5000", "It must be at most 64"),
    of("evaluate.temperature", "1e-30", "at least 0.01"),
    of("train.row_tokens", "1000000000000", "It must be at most"),
    of("data.num_workers", "1000000", "It must be at most 4096"),
    of("seed", "-1", "It must be at least 0"),
]


@each(CASES)
def test_a_number_without_meaning_is_refused_before_anything_is_read(
    case: Case, check_case: CheckCase
) -> None:
    check_case(case)
