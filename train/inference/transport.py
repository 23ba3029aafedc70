"""The path of online states from the target's engines to the ranks, as it follows from where they run."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from data.addresses import is_loopback
from data.transport.spool import MEMORY
from train.config.capture import CaptureConfig, TransportKind
from train.config.vllm import VllmConfig


@dataclass(frozen=True)
class ChosenTransport:
    """How online states travel."""

    mooncake: bool
    spool_dir: Path  # where the ranks' spools are, without Mooncake
    made: bool  # whether the run makes this directory


def chosen_transport(capture: CaptureConfig, vllm: VllmConfig, output_dir: Path) -> ChosenTransport:
    """Return the transport that the recipe sets, or the one that suits the servers.

    Servers that the run starts are on the nodes of their ranks, and so is a server under a loopback address:
    their states wait in memory. Other servers and the ranks share the output directory.
    """
    spool_dir = capture.spool_dir
    if spool_dir is not None:
        directory = Path(spool_dir)
    elif all(is_loopback(urlsplit(url).hostname) for url in vllm.servers):
        directory = MEMORY
    else:
        directory = output_dir / "spool"
    made = directory == output_dir / "spool"
    return ChosenTransport(capture.transport is TransportKind.mooncake, directory.absolute(), made)


def server_roots(capture: CaptureConfig, output_dir: Path) -> list[str]:
    """Return the directories below which a server of this run may write, for offline and online capture."""
    return [str(path.resolve()) for path in (output_dir, Path(capture.spool_dir or MEMORY))]
