"""Numbers in words."""


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
