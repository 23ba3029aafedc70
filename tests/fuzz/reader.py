"""One reader of one file, and the errors that it documents."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from eagle31.errors import UserError

DOCUMENTED = (UserError, OSError)  # what a reader may raise, whatever the file
MalformedErrors = tuple[type[Exception], ...]


@dataclass(frozen=True)
class Reader:
    """A reader of one file: where the file is in its directory, a valid content, and the call."""

    file: str
    content: bytes
    read: Callable[[Path], object]  # given the directory
    documented: MalformedErrors = DOCUMENTED

    def run(self, directory: Path, content: bytes) -> bool:
        """Read a content; return whether it was accepted. Another error than a documented one is raised."""
        path = directory / self.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        try:
            self.read(directory)
        except self.documented:
            return False
        return True


def readers_of(
    directory: Path,
    calls: Mapping[str, tuple[str, Callable[[Path], object]]],
    documented: MalformedErrors = DOCUMENTED,
) -> dict[str, Reader]:
    """Return the readers by name, with the contents that their files have now."""
    return {
        name: Reader(file, (directory / file).read_bytes(), read, documented)
        for name, (file, read) in calls.items()
    }
