import pytest

from eagle31.errors import UserError
from train.parity.inputs import parse_engine_arguments


def test_engine_arguments_are_json_or_else_text() -> None:
    parsed = parse_engine_arguments(["tensor_parallel_size=2", "quantization=fp8", "enforce_eager=false"])
    assert parsed == {"tensor_parallel_size": 2, "quantization": "fp8", "enforce_eager": False}
    with pytest.raises(UserError, match="--engine-args=fp8"):
        parse_engine_arguments(["fp8"])
