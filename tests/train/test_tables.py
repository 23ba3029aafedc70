from train.tables import aligned


def test_text_is_to_the_left_and_numbers_are_to_the_right() -> None:
    rows = [["", "eagle31", "vLLM"], ["drafts", "1,075", "1,075"], ["acceptance length", "2.060", "12.050"]]
    assert aligned(rows) == [
        "                   eagle31    vLLM",
        "drafts               1,075   1,075",
        "acceptance length    2.060  12.050",
    ]


def test_indentation_of_a_name_stays_and_empty_cells_leave_no_trailing_spaces() -> None:
    assert aligned([["memory", "3 GB"], ["  weights", ""]]) == ["memory     3 GB", "  weights"]
