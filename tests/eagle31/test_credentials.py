import pickle

import pytest

from eagle31.credentials import has_url_credentials, is_secret_name, without_credentials
from eagle31.errors import UserError


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[http://user:secret@host:8000,http://b:1]", "[http://...@host:8000,http://b:1]"),
        ("http://user:se@cr@et@host", "http://...@host"),
        ("s3://AKIA:se/cr+et@bucket/path", "s3://...@bucket/path"),
        ("{api_key: 'a b', x: 1}", "{api_key: (hidden), x: 1}"),
        ('{"hf_token": "a", "bos_token": "<s>"}', '{"hf_token": (hidden), "bos_token": "<s>"}'),
        ("AWS_SECRET_ACCESS_KEY=abc", "AWS_SECRET_ACCESS_KEY=(hidden)"),
        ("hf_abcdefghijklmnopqrst", "(hidden)"),
    ],
)
def test_secrets_are_hidden(text: str, shown: str) -> None:
    assert without_credentials(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "http://host:8000/a@b",
        "http://[::1]:8000/a@b",
        "hf://datasets/owner/name@main",
        "owner/name@v1",
        "max_tokens=3",
        "file.py:3",
    ],
)
def test_what_looks_alike_stays(text: str) -> None:
    assert without_credentials(text) == text
    assert not has_url_credentials(text)


def test_names_of_secrets() -> None:
    assert all(map(is_secret_name, ["HF_TOKEN", "vllm.engine_args.api_key", "token", "AWS_SESSION_TOKEN"]))
    assert not any(map(is_secret_name, ["tokens", "bos_token", "max_tokens", "data.train", "key"]))


def test_an_error_has_no_secret_in_any_part() -> None:
    """Worker processes send errors, pickled, to their parent."""
    error = UserError("a=http://u:secret@h", "http://u:secret@h", "http://u:secret@h does not answer.")
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert "secret" not in repr([str(one), one.field, one.value, one.remedy])
    assert str(UserError("data.train", None, "Give it.")) == "data.train=null: Give it."
    assert str(UserError("drafter.fc_norm", False, "Give it.")) == "drafter.fc_norm=false: Give it."
    assert str(UserError("VLLM_API_KEY", "", "Run export VLLM_API_KEY=$(make).")).endswith("=$(make).")
    assert (
        str(UserError("VLLM_API_KEY", "abc", "abc is short.")) == "VLLM_API_KEY=(hidden): (hidden) is short."
    )
