"""Addresses of machines and of files."""

import socket
from ipaddress import ip_address
from pathlib import Path

_ELSEWHERE = ("192.0.2.1", 9)  # an address of no machine (RFC 5737)


def is_url(location: str | Path) -> bool:
    """Return whether a location is a URL such as s3://bucket/path, and not a path."""
    return "://" in str(location)


def is_loopback(host: str | None) -> bool:
    """Return whether a host name or an IP address stands for the machine that reads it, on every machine."""
    if host == "localhost":
        return True
    try:
        return host is not None and ip_address(host).is_loopback
    except ValueError:
        return False  # a name that other machines may know


def outward_address() -> str | None:
    """Return the address from which this machine reaches others, or None. It sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
        except OSError:
            return None
        return probe.getsockname()[0]
