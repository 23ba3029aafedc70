"""Verdicts on engines that drafted, and did not draft, what the trained drafter does on the same text."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from data.samples import CapturedSample
from eagle31.decoding.speculative import new_sequence
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from tests.eagle31.tiny import random_batch, tiny_config, tiny_drafter
from train.evaluation.agreement import (
    Difference,
    compare_drafts,
    compare_served,
    compare_tokens,
)
from train.evaluation.serving import PlacedDraft, Served

NUM_PROMPT_TOKENS, NUM_TOKENS, K = 6, 40, 3


@dataclass(frozen=True)
class Case:
    """A drafter, a text whose tokens are the target's, and the drafts of an engine that decodes it."""

    drafter: Drafter
    frozen: FrozenParts
    sample: CapturedSample
    drafts: tuple[PlacedDraft, ...]

    @property
    def completion(self) -> list[int]:
        return self.sample.input_ids[NUM_PROMPT_TOKENS:].tolist()

    def compare(
        self, drafts: tuple[PlacedDraft, ...] | None = None, completion: list[int] | None = None
    ) -> tuple[int, list[Difference]]:
        return compare_drafts(
            self.drafter,
            self.frozen,
            self.sample,
            completion or self.completion,
            self.drafts if drafts is None else drafts,
            torch.float32,
        )

    def verdict(self, completion: list[int], alone: list[int]) -> str:
        served, samples = Served([completion], [[]]), [(0, self.sample)]
        found = compare_served(self.drafter, self.frozen, samples, served, torch.float32, [alone])
        return next(name.removeprefix("num_") for name, number in found.completions.items() if number)

    def with_draft(self, index: int, draft: PlacedDraft) -> tuple[PlacedDraft, ...]:
        return (*self.drafts[:index], draft, *self.drafts[index + 1 :])


def drafted(drafter: Drafter, frozen: FrozenParts, sample: CapturedSample) -> tuple[PlacedDraft, ...]:
    """Decode the text with a key/value cache, as an engine does."""
    chain, drafts = new_sequence(drafter, frozen), []
    text, start, position = sample.input_ids.tolist(), 0, 1
    completion = text[NUM_PROMPT_TOKENS:]
    while position < len(completion):
        stop = NUM_PROMPT_TOKENS + position - 1
        states, following = sample.aux_hidden_states[start:stop], sample.input_ids[start + 1 : stop + 1]
        with torch.no_grad():
            tokens = chain.draft(states, following, K)
        right = [a == b for a, b in zip(tokens, completion[position:], strict=False)]
        num_accepted = (*right, False).index(False)
        drafts.append(PlacedDraft(position, tokens, num_accepted))
        start, position = stop, position + num_accepted + 1
    return tuple(drafts)


@pytest.fixture
def case() -> Case:
    config = tiny_config()
    drafter, frozen = tiny_drafter(config, torch.float32)
    batch = random_batch((NUM_TOKENS,), config, seed=6, dtype=torch.float32)
    mask = torch.arange(NUM_TOKENS) >= NUM_PROMPT_TOKENS
    greedy = frozen.target_head(batch.final_hidden_states).argmax(-1)
    input_ids = torch.where(mask, greedy.roll(1), batch.input_ids)
    sample = CapturedSample(input_ids, mask, batch.aux_hidden_states, batch.final_hidden_states)
    for position in range(2, NUM_TOKENS - NUM_PROMPT_TOKENS, 3):  # what the drafter gets right now and then
        draft = next(one for one in drafted(drafter, frozen, sample) if one.position >= position)
        if draft.position < len(sample.input_ids) - NUM_PROMPT_TOKENS:
            wanted, row = draft.token_ids[0], NUM_PROMPT_TOKENS + draft.position
            sample.input_ids[row] = wanted
            sample.final_hidden_states[row - 1] = 9 * frozen.target_head.weight[wanted]  # type: ignore[attr-defined]
    found = Case(drafter, frozen, sample, drafted(drafter, frozen, sample))
    assert {0, 1} <= {draft.num_accepted for draft in found.drafts}
    return found


def test_an_engine_that_drafts_the_same_has_every_draft_compared(case: Case) -> None:
    assert case.compare() == (len(case.drafts), [])
    assert compare_tokens(case.frozen, case.sample, case.completion, torch.float32) == []


@pytest.mark.parametrize("step", range(K))
def test_another_token_is_found_at_each_step(case: Case, step: int) -> None:
    """The tokens after it are judged by what the drafter drafts after it."""
    ids = case.frozen.draft_target_ids
    assert ids is not None
    draft = next(one for one in case.drafts if one.num_accepted == 0 and one.position < 20)
    index = case.drafts.index(draft)
    tokens = list(draft.token_ids)
    tokens[step] = next(
        int(one) for one in ids if int(one) not in (tokens[step], case.completion[draft.position])
    )
    other = replace(draft, token_ids=tokens)
    (found,) = case.compare(case.with_draft(index, other))[1]
    assert (found.what, found.position, found.found) == ("drafted", draft.position, tokens)
    assert found.expected[: step + 1] == draft.token_ids[: step + 1]
    assert found.gap > found.bound > 0
    assert not found.near_tie


def test_a_token_outside_the_draft_vocabulary_is_different(case: Case) -> None:
    ids = case.frozen.draft_target_ids
    assert ids is not None
    draft = case.drafts[0]
    outside = next(one for one in range(61) if one not in ids.tolist() and one != case.completion[1])
    other = replace(draft, token_ids=[*draft.token_ids[:2], outside])
    (found,) = case.compare(case.with_draft(0, other))[1]
    assert not found.near_tie


def test_two_tokens_that_are_equally_likely_are_a_near_tie(case: Case) -> None:
    ids = case.frozen.draft_target_ids
    assert ids is not None
    draft = next(one for one in case.drafts if one.num_accepted == 0)
    index, best = case.drafts.index(draft), draft.token_ids[-1]
    other = next(int(one) for one in ids if int(one) != best)
    with torch.no_grad():
        row = case.drafter.lm_head.weight[ids.tolist().index(best)]
        case.drafter.lm_head.weight[ids.tolist().index(other)] = row * (1 - 1e-6)
    tied = replace(case, drafts=drafted(case.drafter, case.frozen, case.sample))
    assert tied.drafts[index] == draft
    (found,) = tied.compare(tied.with_draft(index, replace(draft, token_ids=[*draft.token_ids[:-1], other])))[
        1
    ]
    assert found.near_tie


def test_accepted_tokens_that_were_not_written_and_the_reverse_are_different(case: Case) -> None:
    for index, change in ((0, 1), (next(i for i, one in enumerate(case.drafts) if one.num_accepted), -1)):
        draft = case.drafts[index]
        other = replace(draft, num_accepted=draft.num_accepted + change)
        found = case.compare((*case.drafts[:index], other))[1]
        assert found[0].what == "accepted"
        assert not found[0].near_tie


@pytest.mark.parametrize("index", [0, 2, -1])
def test_a_missing_draft_is_different(case: Case, index: int) -> None:
    missing = case.drafts[index]
    kept = [one for one in case.drafts if one is not missing]
    served = Served([case.completion], [kept])
    found = compare_served(case.drafter, case.frozen, [(0, case.sample)], served, torch.float32)
    assert [(one.what, one.position) for _, one in found.drafts] == [("no draft", missing.position)]
    counts = {"num_identical": len(kept), "num_near_tie": 0, "num_different": 1, "num_not_compared": 0}
    assert found.counts_of_drafts == counts


def test_drafts_are_compared_as_far_as_the_text_is_the_same(case: Case) -> None:
    parted = case.drafts[3].position
    completion = list(case.completion)
    completion[parted] += 1
    longer = replace(case.drafts[3], num_accepted=0)
    after = PlacedDraft(parted + 1, [0] * K, 0)
    number, found = case.compare((*case.drafts[:3], longer, after), completion)
    assert (number, found) == (4, [])


def test_written_tokens_are_judged_by_the_targets_logits(case: Case) -> None:
    head: Callable[..., torch.Tensor] = case.frozen.target_head
    position = 5
    completion = list(case.completion)
    order = head(case.sample.final_hidden_states[NUM_PROMPT_TOKENS - 1 + position]).argsort(descending=True)
    completion[position] = int(order[1])
    (found,) = compare_tokens(case.frozen, case.sample, completion, torch.float32)
    assert (found.what, found.position, found.expected) == ("written", position, [int(order[0])])
    assert not found.near_tie
    assert case.verdict(completion, case.completion) == "different"
    weight = head.weight  # type: ignore[attr-defined]
    weight[order[1]] = weight[order[0]] * (1 - 1e-6)
    assert case.verdict(completion, case.completion) == "near_tie"


def test_a_completion_that_parts_from_the_first_token_on_is_judged_where_its_state_is_kept(
    case: Case,
) -> None:
    other = [(case.completion[0] + 1) % 61, *case.completion[1:]]
    assert case.verdict(other, case.completion) == "different"
    assert case.verdict(case.completion, other) == "different"  # the one without the drafter is judged, too
    case.sample.final_hidden_states[NUM_PROMPT_TOKENS - 1] = 0  # as a store decodes it
    assert case.verdict(other, case.completion) == "not_compared"


def test_logits_that_are_no_numbers_are_a_difference(case: Case) -> None:
    """Where both sides compute NaN, both choose the same token."""
    with torch.no_grad():
        case.drafter.lm_head.weight.fill_(torch.nan)
    found = case.compare()[1]
    assert len(found) == len(case.drafts)
    assert not any(one.near_tie for one in found)
    case.sample.final_hidden_states.fill_(torch.nan)
    written = compare_tokens(case.frozen, case.sample, case.completion, torch.float32)
    assert len(written) == len(case.completion)
    assert not any(one.near_tie for one in written)


def test_completions_of_other_lengths_are_different(case: Case) -> None:
    shorter = case.completion[:-1]
    for one, other in ((shorter, case.completion), (case.completion, shorter)):
        assert case.verdict(one, other) == "different"


def test_the_report_counts_prompts_and_drafts(case: Case) -> None:
    parted = [*case.completion[:-8], case.completion[-8] + 1]
    kept = tuple(one for one in case.drafts if one.position <= len(parted) - 1)
    last = replace(kept[-1], num_accepted=min(kept[-1].num_accepted, len(parted) - 1 - kept[-1].position))
    served = Served([case.completion, parted], [list(case.drafts), [*kept[:-1], last]])
    samples = [(0, case.sample), (1, case.sample)]
    alone = [case.completion] * 2
    found = compare_served(case.drafter, case.frozen, samples, served, torch.float32, alone)
    assert (found.completions["num_identical"], found.completions["num_different"]) == (1, 1)
    assert found.counts_of_drafts["num_identical"] == len(case.drafts) + len(kept)
    assert found.counts_of_drafts["num_not_compared"] == 0
    assert found.counts_of_tokens["num_different"] == 1
