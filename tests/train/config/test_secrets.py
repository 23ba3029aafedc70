from pathlib import Path

import pytest

from eagle31.errors import UserError
from train.config.compose import compose_config, composed

SECRET = "planted-secret"
TOKEN, WANDB_KEY = "hf_plantedsecret0000000000", "0123456789abcdef" * 2
KEY = "planted/secret:of+a@store"  # keys of object storage have such characters


@pytest.mark.parametrize(
    ("setting", "field"),
    [
        (f"vllm.servers=['http://user:{SECRET}@node1:8000']", "vllm.servers"),
        (f"capture.store='s3://key:{SECRET}@bucket/store'", "capture.store"),
        (f"data.train='https://user:{SECRET}@host/data.jsonl'", "data.train"),
        (f"vllm.engine_args.api_key={SECRET}", "vllm.engine_args.api_key"),
        (f"drafter.init_from={TOKEN}/drafter", "drafter.init_from"),
        (f"data.template_kwargs={{note: {TOKEN}}}", "data.template_kwargs.note"),
        (f"data.template_kwargs={{{TOKEN}: 1}}", "data.template_kwargs"),
        (f"data.sources={{a: {{source: {TOKEN}/data}}}}", "data.sources.a.source"),
        ("data.eval=outputs/${oc.env:WANDB_API_KEY}", "data.eval"),
    ],
)
def test_a_secret_in_a_configuration_is_refused_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, field: str
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", WANDB_KEY)
    with pytest.raises(UserError, match=f"^{field}=.*written to files") as caught:
        composed(["recipe=quickstart", f"output_dir={tmp_path}", setting])
    assert not any(one in str(caught.value) for one in (SECRET, TOKEN, WANDB_KEY))


@pytest.mark.parametrize(
    "argument",
    [
        f"HF_TOKEN={KEY}",
        f"capture.store=s3://key:{KEY}@bucket/store",
        f"recipe=https://user:{KEY}@host",
        TOKEN,
    ],
)
def test_no_error_of_an_argument_repeats_a_secret(argument: str) -> None:
    with pytest.raises(UserError) as caught:
        compose_config(["recipe=quickstart", argument])
    error = caught.value
    assert "planted" not in f"{error} {error.field} {error.value} {error.remedy}"
    assert "(hidden)" in str(error) or "://...@" in str(error)
