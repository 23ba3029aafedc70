"""The backend that vLLM gets where the one that it would choose has no kernels for the dtype."""

from pathlib import Path

import pytest

from data.capture.vllm.arguments import CaptureEngine
from train.engines.serving import EngineSpec


# Prints, for each set of arguments, the backend that vLLM chooses for the target's layers.
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_only_a_cpu_and_a_dtype_without_amx_kernels_need_the_choice(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choices() -> list[object]:
        capture = CaptureEngine("target", (1,), 4, 100, [], dtype=dtype)
        drafting = EngineSpec("target", Path("/export"), k=3, dtype=dtype).arguments()
        return [
            capture.arguments().get("attention_backend"),
            capture.answer_arguments().get("attention_backend"),
            drafting.get("attention_backend"),
            drafting["speculative_config"].get("attention_backend"),
        ]

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert choices() == ["CPU_MLA"] * 4
    own = CaptureEngine("target", (1,), 4, 100, [], dtype=dtype, extra={"attention_config": {}})
    assert "attention_backend" not in own.arguments()
    line = CaptureEngine("target", (1,), 4, 100, [], dtype=dtype).command_line()
    assert line[line.index("--attention-backend") + 1] == "CPU_MLA"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert choices() == [None] * 4
