"""Tables for a terminal or a log."""

from collections.abc import Sequence

from tabulate import tabulate


def aligned(rows: Sequence[Sequence[str]], text_columns: int = 1) -> list[str]:
    """Return the rows as lines with aligned columns, two spaces apart; the first row may be a header.

    Args:
        rows: cells that are formatted already, the same number in each row.
        text_columns: how many columns from the left hold text and align to the left; the others hold numbers
            and align to the right.
    """
    if not rows:
        return []
    num_columns = len(rows[0])
    assert all(len(row) == num_columns for row in rows)
    sides = ["left"] * text_columns + ["right"] * (num_columns - text_columns)
    table = tabulate(
        rows, tablefmt="plain", colalign=sides[:num_columns], disable_numparse=True, preserve_whitespace=True
    )
    return [line.rstrip() for line in table.splitlines()]
