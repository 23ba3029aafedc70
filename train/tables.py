"""Tables and numbers for a terminal or a log."""

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


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


def rounded(count: float, digits: int) -> str:
    """Format a count with `digits` significant digits in thousands (K), millions (M) or billions (B)."""
    for factor, unit in ((1e9, "B"), (1e6, "M")):
        if count >= factor:
            return f"{count / factor:,.{digits}g} {unit}"
    return f"{count / 1e3:.{digits}g} K"


def gigabytes(count: float) -> str:
    """Format bytes with three significant digits in MB, GB or TB (10^6, 10^9, 10^12 bytes)."""
    if count >= 1e12:
        return f"{count / 1e12:.3g} TB"
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"
