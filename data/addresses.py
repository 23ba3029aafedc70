"""Addresses of machines."""

from ipaddress import ip_address


def is_loopback(host: str | None) -> bool:
    """Return whether a host name or an IP address stands for the machine that reads it, on every machine."""
    if host == "localhost":
        return True
    try:
        return host is not None and ip_address(host).is_loopback
    except ValueError:
        return False  # a name that other machines may know
