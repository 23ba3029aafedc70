"""Addresses of machines and on the Hub."""

import pytest
from huggingface_hub import constants

from data.addresses import is_loopback
from data.conversations.reading import Source
from data.target.loading import load_config
from data.target.spec import TargetSpec
from eagle31.errors import UserError


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1", "::1"])
def test_a_loopback_address_is_each_machines_own(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["node1", "10.0.0.2", "0.0.0.0", "fe80::1", "127.example", "", None])
def test_other_addresses_may_be_of_another_machine(host: str | None) -> None:
    assert not is_loopback(host)


def test_a_name_that_only_the_hub_may_know_is_refused_at_once_where_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="does not answer") as refused:
        load_config(TargetSpec("nobody/nothing"))
    assert (refused.value.field, refused.value.value) == ("target.model", "nobody/nothing")
    with pytest.raises(UserError, match="does not answer") as refused:
        Source("nobody/nothing").fingerprint()
    assert (refused.value.field, refused.value.value) == ("data.train", "nobody/nothing")
