"""The backend that vLLM chooses from our arguments on a processor that reports AMX."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from data.capture.vllm.arguments import CaptureEngine
from data.capture.vllm.environment import environment
from tests.data.capture.vllm.targets import capture_engine, save_gqa, save_mla
from train.engines.serving import EngineSpec

# Prints, for each set of arguments, the backend that vLLM chooses for the target's layers.
SELECT = """
import json, sys
import torch
torch.cpu._is_amx_tile_supported = lambda: True
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.selector import get_attn_backend
for arguments in json.load(sys.stdin):
    arguments.pop("kv_transfer_config", None)
    config = EngineArgs(**arguments).create_engine_config()
    model = config.model_config
    with set_current_vllm_config(config):
        chosen = get_attn_backend(model.get_head_size(), model.dtype, "auto", use_mla=model.use_mla)
    print("chosen:" + json.dumps([chosen.get_name(), config.cache_config.block_size]), flush=True)
"""


def chosen_backends(python: Path, *arguments: dict) -> list[list]:
    done = subprocess.run(
        [str(python), "-I", "-c", SELECT],
        input=json.dumps(arguments),
        env=environment(python),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [
        json.loads(line.removeprefix("chosen:"))
        for line in done.stdout.splitlines()
        if line.startswith("chosen:")
    ]


def test_float32_latent_attention_gets_a_backend_that_takes_it(vllm_python: Path, tmp_path: Path) -> None:
    mla, gqa = save_mla(tmp_path / "mla"), save_gqa(tmp_path / "gqa")
    capture = capture_engine(mla, (1, 2), tmp_path)
    evaluation = EngineSpec(target=mla.model, max_model_len=64)
    unset = capture.arguments()
    del unset["attention_backend"]
    found = chosen_backends(
        vllm_python,
        unset,
        capture.arguments(),
        evaluation.arguments(),
        replace(capture, dtype="bfloat16").arguments(),
        replace(capture, extra={"attention_backend": "AMX_MLA"}).arguments(),
        capture_engine(gqa, (1, 2), tmp_path).arguments(),
    )
    assert [name for name, _ in found] == [
        "AMX_MLA",  # what vLLM does without the argument
        "CPU_MLA",
        "CPU_MLA",
        "AMX_MLA",
        "AMX_MLA",
        "CPU_ATTN",
    ]
    assert [block_size for _, block_size in found[:2]] == [128, 16]


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
