"""Addresses of machines."""

import pytest

from data.addresses import is_loopback


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1", "::1"])
def test_a_loopback_address_is_each_machines_own(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["node1", "10.0.0.2", "0.0.0.0", "fe80::1", "127.example", "", None])
def test_other_addresses_may_be_of_another_machine(host: str | None) -> None:
    assert not is_loopback(host)
