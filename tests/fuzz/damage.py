"""Ways in which a file is damaged."""

from collections.abc import Callable
from pathlib import Path


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    """Flip the lowest bit of the byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove(path: Path) -> None:
    path.unlink()


def junk(path: Path) -> None:
    path.write_bytes(bytes((37 * index + 11) % 256 for index in range(999)))


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut": cut,
    "empty": empty,
    "flipped": flip,
    "missing": remove,
    "junk": junk,
    "directory": directory,
}
