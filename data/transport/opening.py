"""The producer's end of a transport, as a request names it."""

from collections.abc import Mapping
from typing import Any

from data.transport.mooncake import MooncakeTransport
from data.transport.protocol import Transport
from data.transport.spool import Spool


def open_transport(content: Mapping[str, Any]) -> Transport:
    """From what the transport's `to_json` says."""
    return MooncakeTransport.from_json(content) if "mooncake" in content else Spool.from_json(content)
