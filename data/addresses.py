"""Addresses of machines and of files."""

from ipaddress import ip_address
from pathlib import Path


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
