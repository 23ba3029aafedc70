"""Opens the producer's end of a transport."""

from collections.abc import Mapping
from typing import Any

from data.transport.mooncake import MooncakeTransport
from data.transport.protocol import Transport
from data.transport.spool import Spool


def open_transport(content: Mapping[str, Any]) -> Transport:
    """Open the transport whose `to_json` returned `content`."""
    return MooncakeTransport.from_json(content) if "mooncake" in content else Spool.from_json(content)
