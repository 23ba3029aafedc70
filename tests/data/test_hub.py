"""A machine without a network."""

import pytest
from huggingface_hub import constants

from data.conversations.reading import Source
from data.target.loading import load_config
from data.target.spec import TargetSpec
from eagle31.errors import UserError


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
