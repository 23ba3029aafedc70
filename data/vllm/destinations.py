"""Where a request to vLLM has its states written, and what a server accepts of that."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.store.codec import Encoding

# A shard is in memory until it is full.
MAX_SHARD_BYTES = 16_000_000_000
_DTYPES = ("bfloat16", "float16", "float32")
_FIELDS = {
    "store": {"store", "encoding", "shard_tokens"},
    "spool": {"spool", "encoding"},
    "mooncake": {"mooncake", "num_aux_layers", "hidden_size", "dtype"},
}


@dataclass(frozen=True)
class Accepted:
    """The destinations that a server writes to.

    roots: it writes in these directories only.
    mooncake_masters: the Mooncake stores that it may put into, as HOST:PORT.
    num_aux_layers, hidden_size, token_bytes: the size of its states, and of all states of a token.
    """

    roots: Sequence[str]
    mooncake_masters: Sequence[str]
    num_aux_layers: int
    hidden_size: int
    token_bytes: int


def store_destination(directory: Path, encoding: Encoding, shard_tokens: int) -> dict[str, Any]:
    """Return the destination for a store, which the server reaches under the same path."""
    path = str(directory.resolve())
    return {"store": path, "encoding": encoding.to_json(), "shard_tokens": shard_tokens}


def name_of(destination: Mapping[str, Any]) -> str:
    """Return what identifies a destination: the store's or the spool's directory, or the Mooncake store."""
    if "mooncake" in destination:
        return f"mooncake {destination['mooncake']['master']} {destination['dtype']}"
    return str(destination["store"] if "store" in destination else destination["spool"])


def resolved(destination: Mapping[str, Any]) -> dict[str, Any]:
    """Return the destination with links and `..` in its path resolved, so that it is written where it was
    checked."""
    paths = {name: os.path.realpath(destination[name]) for name in ("store", "spool") if name in destination}
    return {**destination, **paths}


def refusal(destination: Mapping[str, Any], accepted: Accepted) -> str | None:
    """Return why a server does not write to a destination, or None.

    Raises:
        KeyError, TypeError, ValueError, OSError: `destination` is no destination.
    """
    (kind,) = _FIELDS.keys() & destination.keys()
    if destination.keys() != _FIELDS[kind]:
        return (
            f"A destination of this kind has the fields {sorted(_FIELDS[kind])}, not {sorted(destination)}."
        )
    if kind == "mooncake":
        return _mooncake_refusal(destination, accepted)
    Encoding(**destination["encoding"])  # raises UserError
    directory = destination[kind]
    if not below(directory, accepted.roots):
        return f"{directory} is not below {', '.join(accepted.roots)}."
    if kind == "spool":
        exists = os.path.isdir(directory)
        return None if exists else f"{directory} does not exist on the machine of the server."
    return shard_refusal(destination["shard_tokens"], accepted.token_bytes)


def shard_refusal(shard_tokens: int, token_bytes: int) -> str | None:
    """Return why a server does not write shards of this many tokens, or None."""
    largest = MAX_SHARD_BYTES // token_bytes
    if type(shard_tokens) is not int or not 1 <= shard_tokens <= largest:
        return f"shard_tokens must be a number from 1 to {largest}, not {shard_tokens!r}."
    return None


def _mooncake_refusal(destination: Mapping[str, Any], accepted: Accepted) -> str | None:
    settings = destination["mooncake"]
    if settings["master"] not in accepted.mooncake_masters:
        return f"{settings['master']} is not one of the Mooncake stores that the server may use."
    if settings["segment_bytes"] != 0:
        return (
            f"The server lends no memory to a Mooncake store, and so not {settings['segment_bytes']} bytes."
        )
    if destination["dtype"] not in _DTYPES:
        return f"dtype must be one of {', '.join(_DTYPES)}, not {str(destination['dtype'])[:40]}."
    size = (destination["num_aux_layers"], destination["hidden_size"])
    if size != (accepted.num_aux_layers, accepted.hidden_size):
        captured = f"{accepted.num_aux_layers} aux layers of {accepted.hidden_size}"
        return f"The server captures {captured}, not {size[0]} of {size[1]}."
    return None


def below(directory: str, roots: Sequence[str]) -> bool:
    """Return whether a directory is one of the roots or inside one, after links are resolved."""
    if not os.path.isabs(directory):
        return False
    path = Path(directory).resolve()
    return any(path.is_relative_to(Path(root).resolve()) for root in roots)
