"""Verdicts on decoding that did, and did not do, what replay says."""

from dataclasses import dataclass, replace

import pytest
import torch

from data.batches.rows import pack_row
from data.samples import CapturedSample
from eagle31.decoding.replay import replayed_drafts
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.teacher_forced import greedy_hits, logits_of_draft
from tests.eagle31.tiny import random_batch, tiny_config, tiny_drafter
from train.engines.serving import PlacedDraft
from train.evaluation.agreement import DraftedCompletion, replay_verdict

NUM_PROMPT_TOKENS, K = 6, 3


@dataclass(frozen=True)
class Case:
    """A drafter, a sample that it often drafts right, and decoding that agrees with replay."""

    drafter: Drafter
    frozen: FrozenParts
    sample: CapturedSample
    decoded: DraftedCompletion

    def verdict(self, decoded: DraftedCompletion) -> str:
        return replay_verdict(self.drafter, self.frozen, self.sample, decoded, K, torch.float32)

    def with_accepted(self, index: int, num_accepted: int) -> DraftedCompletion:
        """Return decoding whose drafts end with this one, which accepted another number of tokens."""
        drafts = list(self.decoded.drafts[: index + 1])
        drafts[index] = replace(drafts[index], num_accepted=num_accepted)
        return replace(self.decoded, drafts=drafts)

    def row(self, index: int) -> int:
        return NUM_PROMPT_TOKENS + self.decoded.drafts[index].position - 2


def drafted(drafter: Drafter, frozen: FrozenParts, sample: CapturedSample) -> DraftedCompletion:
    batch = pack_row([sample], len(sample.input_ids))
    drafts = []
    for row, num_accepted in replayed_drafts(*greedy_hits(drafter, frozen, batch, K), K):
        drafts.append(PlacedDraft(row + 2 - NUM_PROMPT_TOKENS, [0] * K, num_accepted))
    return DraftedCompletion(sample.input_ids[NUM_PROMPT_TOKENS:].tolist(), drafts)


@pytest.fixture
def case() -> Case:
    config = tiny_config()
    drafter, frozen = tiny_drafter(config, torch.float32)
    batch = random_batch((40,), config, seed=6, dtype=torch.float32)
    mask = torch.arange(40) >= NUM_PROMPT_TOKENS
    sample = CapturedSample(batch.input_ids, mask, batch.aux_hidden_states, batch.final_hidden_states)
    ids = frozen.draft_target_ids
    assert ids is not None
    for row in range(NUM_PROMPT_TOKENS - 1, 37, 2):  # the text agrees with the drafter here and there
        packed = pack_row([sample], 40)
        sample.input_ids[row + 2] = ids[logits_of_draft(drafter, frozen, packed, row, 0).argmax()]
    found = Case(drafter, frozen, sample, drafted(drafter, frozen, sample))
    assert {0, 1} <= {draft.num_accepted for draft in found.decoded.drafts}
    return found


def test_another_number_of_accepted_tokens_is_different(case: Case) -> None:
    for index in (0, 3):
        accepted = case.decoded.drafts[index].num_accepted
        assert case.verdict(case.with_accepted(index, (accepted + 1) % 2)) == "different"


def test_a_missing_draft_is_different(case: Case) -> None:
    missing = replace(case.decoded, drafts=case.decoded.drafts[:2] + case.decoded.drafts[3:])
    assert case.verdict(missing) == "different"


def test_two_drafts_that_are_equally_likely_are_a_near_tie(case: Case) -> None:
    batch = pack_row([case.sample], len(case.sample.input_ids))
    with torch.no_grad():
        best, second = logits_of_draft(case.drafter, case.frozen, batch, case.row(0), 0).topk(2).indices
        case.drafter.lm_head.weight[second] = case.drafter.lm_head.weight[best]
    tied = replace(case, decoded=drafted(case.drafter, case.frozen, case.sample))
    accepted = tied.decoded.drafts[0].num_accepted
    other = 0 if accepted else 1
    assert min(accepted, other) == 0  # they part at the first token, which is the tied one
    assert tied.verdict(tied.with_accepted(0, other)) == "near_tie"


def test_completions_that_part_are_judged_by_the_targets_logits(case: Case) -> None:
    draft = case.decoded.drafts[2]
    token_ids = list(case.decoded.token_ids)
    token_ids[draft.position] += 1  # the first drafted token is another one in decoding
    parted = replace(case.decoded, token_ids=token_ids, drafts=case.decoded.drafts[:2])
    assert case.verdict(parted) == "different"
    margins = [(1.0, 0.0)] * len(token_ids)
    margins[draft.position] = (1e-6, 1e-3)
    assert case.verdict(replace(parted, margins=margins)) == "near_tie"
    assert case.verdict(replace(parted, margins=[(1.0, 1e-3)] * len(token_ids))) == "different"
    assert case.verdict(replace(case.decoded, token_ids=case.decoded.token_ids[:-1])) == "different"
