from eagle31.decoding.acceptance import AcceptanceStats


def test_figures() -> None:
    stats = AcceptanceStats.from_lengths(3, [0, 3, 1, 1])
    assert stats.accepted_per_position == (3, 1, 1)
    assert stats.acceptance_length == 1 + 5 / 4
    assert stats.absolute_acceptance == (0.75, 0.25, 0.25)
    assert stats.conditional_acceptance == (0.75, 1 / 3, 1.0)
    assert stats + stats == AcceptanceStats.from_lengths(3, [0, 3, 1, 1] * 2)


def test_no_draft_is_an_acceptance_length_of_one() -> None:
    assert AcceptanceStats.from_lengths(2, []).acceptance_length == 1.0
