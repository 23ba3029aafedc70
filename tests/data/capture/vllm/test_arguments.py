"""Engines that would give other states, or change a completion."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data.capture.vllm.arguments import CaptureEngine, check_final_states
from data.capture.vllm.client import VllmClient
from data.capture.vllm.environment import check_engine_args, check_served
from data.capture.vllm.server_info import ServerInfo
from data.generation.vllm import check_unchanged
from data.target.architecture import from_architecture
from data.target.loading import load_config
from data.target.parts import CapturedTarget, load_target_parts
from data.target.spec import TargetSpec
from eagle31.errors import UserError
from tests.data.capture.vllm.servers import INFO
from tests.data.target.tiny_target import save_target
from train.evaluation.serving import EngineSpec


def engine(family: str = "qwen3", aux_layer_ids: tuple[int, ...] = (1,), **extra: object) -> CaptureEngine:
    """Return an engine of a target whose weights do not matter."""
    config = from_architecture({"model_type": family})
    parts: Any = SimpleNamespace(config=config, num_layers=4, fingerprint="f", dtype_name="float32")
    return CaptureEngine(CapturedTarget(TargetSpec("target"), parts, aux_layer_ids), 100, [], extra)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("pipeline_parallel_size", 2, "Only the last stage"),
        ("prefill_context_parallel_size", 4, "a part of the tokens only"),
        ("async_scheduling", True, "may repeat tokens"),
    ],
)
def test_arguments_that_divide_or_change_the_states_are_refused(
    name: str, value: object, reason: str
) -> None:
    with pytest.raises(UserError, match=f"vllm.engine_args.{name}={str(value).lower()}: .*{reason}"):
        engine(**{name: value})
    harmless = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "kv_cache_dtype": "fp8"}
    assert engine(**harmless).arguments()["async_scheduling"] is False


def test_a_target_with_several_residual_streams_is_captured_by_transformers() -> None:
    check_final_states(from_architecture({"model_type": "deepseek_v3"}))
    with pytest.raises(UserError, match=r"capture\.source=vllm: .*capture=hf"):
        check_final_states(from_architecture({"model_type": "deepseek_v4"}))


def test_the_embedding_output_of_a_target_with_latent_attention_is_refused() -> None:
    with pytest.raises(UserError, match=r"aux_layer_ids=\[0, 2\]: vLLM gives no embedding output"):
        engine("deepseek_v3", (0, 2))


def test_what_vllm_refuses_names_the_users_argument(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'error: max_num_seqs Input should be greater' >&2\nexit 1\n")
    python.chmod(0o755)
    for given, field in (
        ({"seed": 1, "max_num_seqs": 0}, r"\.max_num_seqs=0"),
        ({"seed": 1}, "={'seed': 1}"),
    ):
        with pytest.raises(UserError, match=f"vllm.engine_args{field}: .*Input should be greater"):
            check_engine_args(python, [], given)


@pytest.mark.full("it imports vLLM")
def test_vllm_checks_the_arguments_without_the_weights(vllm_python: Path, tmp_path: Path) -> None:
    spec = save_target(tmp_path)
    target = CapturedTarget(spec, load_target_parts(spec), (1,))
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    given = {"max_num_seqs": 0}
    # A prompt may fill all of the target's positions, of which vLLM wants one more.
    positions = target.parts.config.max_position_embeddings
    engine = CaptureEngine(target, positions, [], given)
    with pytest.raises(UserError, match=r"vllm\.engine_args\.max_num_seqs=0: .*greater than or equal to 1"):
        check_engine_args(vllm_python, engine.command_line(captures=False), given)


@pytest.mark.parametrize(
    ("family", "status", "refused"), [("gemma3", 3, True), ("gemma3", 0, False), ("qwen3", 3, False)]
)
def test_a_target_that_vllm_does_not_serve_is_refused_unless_vllm_says_otherwise(
    family: str, status: int, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, spec = tmp_path / "python", save_target(tmp_path / "target", family)
    python.write_text(f"#!/bin/sh\nexit {status}\n")
    python.chmod(0o755)
    monkeypatch.setenv("EAGLE31_VLLM_PYTHON", str(python))
    if refused:
        with pytest.raises(
            UserError, match=r"--target=.*not serve Gemma3ForCausalLM with EAGLE 3.*Do this\."
        ):
            check_served("--target", spec, load_config(spec), {}, "Do this.")
    else:
        check_served("--target", spec, load_config(spec), {}, "Do this.")


@pytest.mark.full("it imports vLLM twice")
def test_vllm_says_whether_it_serves_a_target(
    vllm_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE31_VLLM_PYTHON", str(vllm_python))
    spec = save_target(tmp_path, "gemma3")
    check_served("target.model", spec, load_config(spec), {"model_impl": "transformers"}, "")
    with pytest.raises(UserError, match=r"target\.model=.* does not serve Gemma3ForCausalLM"):
        check_served("target.model", spec, load_config(spec), {}, "")


@pytest.mark.parametrize(
    ("changes", "samples", "message"),
    [
        ({"async_scheduling": True}, False, "asynchronous scheduling"),
        ({"device": "cpu"}, True, "on a CPU, where vLLM then ignores the temperature"),
        ({"device": "cpu"}, False, None),
        ({}, True, None),
        ({"aux_layer_ids": (), "device": "cpu"}, True, None),
    ],
)
def test_completions_that_capture_can_change_are_refused(
    changes: dict, samples: bool, message: str | None
) -> None:
    info, server = ServerInfo.from_json(INFO.to_json() | changes), VllmClient("http://127.0.0.1:9", 1)
    if message is None:
        check_unchanged(server, info, samples=samples)
    else:
        with pytest.raises(UserError, match=message):
            check_unchanged(server, info, samples=samples)


def test_a_cpu_gets_the_backend_that_has_kernels_for_float32(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")

    def choices() -> list[object]:
        capture = engine()
        drafting = EngineSpec(TargetSpec("target", dtype="float32"), tmp_path, k=3).arguments()
        return [
            capture.arguments().get("attention_backend"),
            capture.arguments(captures=False).get("attention_backend"),
            drafting.get("attention_backend"),
            drafting["speculative_config"].get("attention_backend"),
        ]

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert choices() == ["CPU_MLA"] * 4
    own = engine(attention_config={})
    assert "attention_backend" not in own.arguments()
    line = engine().command_line()
    assert line[line.index("--attention-backend") + 1] == "CPU_MLA"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert choices() == [None] * 4
