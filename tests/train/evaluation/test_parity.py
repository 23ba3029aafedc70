from dataclasses import replace

import pytest

from eagle31.decoding.speculative import Decoded
from train.engines.serving import PlacedDraft, Served, cut_to_completion, placed_drafts
from train.evaluation.parity import Comparison, check_case

K = 3
WIDE = 1.0
TIE, BOUND = 5e-5, 1e-4  # a margin, and the one up to which rounding may decide
COMPLETION = list(range(10, 22))


def decoded(
    completion: list[int], accepted: list[int], ties: tuple[int, ...] = (), draft_ties: tuple[int, ...] = ()
) -> Decoded:
    """Return drafts that follow the completion as long as they are accepted, and differ then.

    Args:
        ties: positions of the completion where the target's top logits nearly tie.
        draft_ties: indices of drafts whose second token is a near-tie.
    """
    drafts, position = [], 1
    for num_accepted in accepted:
        right = completion[position : position + num_accepted]
        drafts.append([*right, *[90 + position] * (K - num_accepted)])
        position += num_accepted + 1
    return Decoded(
        token_ids=completion,
        accepted=accepted,
        seconds=1.0,
        margins=[TIE if i in ties else WIDE for i in range(len(completion))],
        drafts=drafts,
        draft_margins=[[WIDE, TIE if i in draft_ties else WIDE, WIDE] for i in range(len(drafts))],
        bounds=[BOUND] * len(completion),
        draft_bounds=[[BOUND] * K for _ in drafts],
    )


def served(reference: Decoded, **changes: PlacedDraft) -> Served:
    """Return the evaluator's drafts as vLLM's, with those at `at_<position>` replaced."""
    placed = {f"at_{draft.position}": draft for draft in placed_drafts(reference)} | changes
    drafts = sorted(placed.values(), key=lambda draft: draft.position)
    return Served([list(reference.token_ids)], [drafts])


def check(reference: Decoded, side: Served, plain: Served | None = None, **options: bool) -> Comparison:
    return check_case([reference], side, plain, K, **options)


REFERENCE = decoded(COMPLETION, [2, 0, 3, 1, 0])  # drafts at 1, 4, 5, 9, 11


def test_equal_sides_pass() -> None:
    comparison = check(REFERENCE, served(REFERENCE), Served([COMPLETION]))
    assert comparison.passed
    assert (comparison.num_compared, comparison.num_equal) == (5, 5)
    assert comparison.ours == comparison.vllm
    assert comparison.vllm.accepted_per_position == (3, 2, 1)


def test_different_drafted_token_is_found() -> None:
    other = PlacedDraft(4, [94, 95, 94], 0)
    comparison = check(REFERENCE, served(REFERENCE, at_4=other))
    (difference,) = comparison.differences
    assert (difference.what, difference.prompt, difference.position) == ("drafted tokens", 0, 4)
    assert (difference.ours, difference.vllm, difference.margin) == ([94, 94, 94], [94, 95, 94], WIDE)
    assert comparison.num_equal == 4
    assert comparison.failures == ["1 drafts differ"]


def test_near_tie_of_the_drafter_is_listed_and_passes() -> None:
    reference = replace(
        REFERENCE, draft_margins=decoded(COMPLETION, [2, 0, 3, 1, 0], draft_ties=(1,)).draft_margins
    )
    comparison = check(reference, served(reference, at_4=PlacedDraft(4, [94, 95, 94], 0)))
    assert [one.position for one in comparison.near_ties] == [4]
    assert (comparison.num_equal, comparison.differences) == (4, [])
    assert comparison.passed
    # The tie is at the second token and does not excuse a different first one.
    assert not check(reference, served(reference, at_4=PlacedDraft(4, [80, 94, 94], 0))).passed


def test_accepted_counts_are_judged_by_the_targets_margin() -> None:
    """vLLM accepts one token fewer at position 1, drafts at 3 instead of 4, and drafts at 5 again."""
    out_of_step = {"at_1": PlacedDraft(1, REFERENCE.drafts[0], 1), "at_3": PlacedDraft(3, [13, 7, 7], 1)}
    side = served(REFERENCE, **out_of_step)
    side.drafts[0].remove(placed_drafts(REFERENCE)[1])
    comparison = check(REFERENCE, side)
    (difference,) = comparison.differences
    assert (difference.what, difference.ours, difference.vllm) == ("accepted", [2], [1])
    assert comparison.num_compared == 4  # 1, 5, 9, 11: neither 3 nor 4 has a counterpart
    assert comparison.num_equal == 3
    # They differ where the second drafted token is verified, at position 2 of the completion.
    assert check(decoded(COMPLETION, [2, 0, 3, 1, 0], ties=(2,)), side).passed
    assert not check(decoded(COMPLETION, [2, 0, 3, 1, 0], ties=(1, 3)), side).passed


def test_drafts_after_a_different_token_are_not_compared() -> None:
    side = served(REFERENCE, at_9=PlacedDraft(9, [1, 2, 3], 0))
    side.completions[0][8] = 77
    comparison = check(REFERENCE, side, Served([side.completions[0]]))
    assert comparison.num_compared == 3
    assert comparison.differences == []
    assert comparison.plain_completions == []
    assert comparison.failures == ["completions differ from the evaluator's"]
    reference = decoded(COMPLETION, [2, 0, 3, 1, 0], ties=(8,))
    assert check(reference, side).passed
    assert check(reference, side).completions[0].near_tie


def test_engine_without_drafts_fails() -> None:
    assert check(REFERENCE, Served([COMPLETION], [[]])).failures == ["vLLM drafted nothing"]


def test_accepted_tokens_past_the_end_do_not_count() -> None:
    """The engine also counts tokens that it accepted after a stop token; the evaluator stops there."""
    reference = decoded(COMPLETION[:4], [1, 1])  # drafts at 1 and 3; the last token is the accepted one at 3
    side = Served(
        [COMPLETION[:4]], [[PlacedDraft(1, [11, 91, 91], 1), PlacedDraft(3, reference.drafts[1], 3)]]
    )
    assert [draft.num_accepted for draft in cut_to_completion(side.drafts[0], 4)] == [1, 1]
    comparison = check(reference, side)
    assert comparison.passed
    assert comparison.ours == comparison.vllm


@pytest.mark.parametrize(
    ("num_ties", "num_drafts", "passes"), [(1, 40, True), (2, 399, False), (2, 400, True)]
)
def test_one_near_tie_in_200_drafts_is_allowed(num_ties: int, num_drafts: int, passes: bool) -> None:
    reference = decoded(list(range(num_drafts + 1)), [0] * num_drafts, draft_ties=tuple(range(num_ties)))
    changes = {f"at_{i + 1}": PlacedDraft(i + 1, [91 + i, 5, 5], 0) for i in range(num_ties)}
    comparison = check(reference, served(reference, **changes))
    assert len(comparison.near_ties) == num_ties
    assert comparison.passed is passes


def test_completions_are_compared_with_the_engine_without_drafter() -> None:
    side, plain = served(REFERENCE), [*COMPLETION[:6], 55, *COMPLETION[7:]]
    comparison = check(REFERENCE, side, Served([plain]))
    assert comparison.failures == ["completions differ from vLLM's without the drafter"]
    (difference,) = comparison.plain_completions
    assert (difference.position, difference.ours, difference.vllm) == (6, [55], [16])
    assert check(decoded(COMPLETION, [2, 0, 3, 1, 0], ties=(6,)), side, Served([plain])).passed


def test_half_precision_compares_the_acceptance_length() -> None:
    completion = list(range(1000, 1250))
    reference = decoded(completion, [1] * 120)  # acceptance length 2

    def rejecting(num: int) -> Comparison:
        changes = {f"at_{1 + 2 * i}": PlacedDraft(1 + 2 * i, [1, 2, 3], 0) for i in range(num)}
        return check(reference, served(reference, **changes), exact=False)

    assert rejecting(11).passed  # 4.6 % of the acceptance length
    assert not rejecting(13).passed  # 5.4 %
    assert rejecting(11).num_equal == 109
