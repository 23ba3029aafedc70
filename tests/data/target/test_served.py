"""What is said of architectures that an engine serves with EAGLE 3, or does not."""

from transformers import Gemma3TextConfig

from data.target.served import architecture, engines, serving_engines, unserved
from eagle31.export.layouts import Layout


def test_what_an_engine_does_not_serve_names_the_engines_that_do() -> None:
    vllm, sglang = engines()
    assert serving_engines("Qwen3ForCausalLM") == [vllm, sglang]
    assert unserved("Qwen3ForCausalLM") is None
    gemma = unserved("Gemma3ForCausalLM")
    assert gemma is not None
    assert gemma.startswith(
        f"{vllm} does not serve Gemma3ForCausalLM with EAGLE 3. {sglang} does (export.layout"
    )
    assert unserved("Gemma3ForCausalLM", Layout.sglang) is None
    olmo = unserved("Olmo3ForCausalLM", Layout.sglang)
    assert olmo is not None
    assert olmo.startswith(
        f"{sglang} does not serve Olmo3ForCausalLM with EAGLE 3. {vllm} does (export.layout=v"
    )
    assert "model-impl" not in olmo
    unknown = unserved("NewForCausalLM")
    assert unknown is not None
    assert "does (" not in unknown


def test_a_config_without_an_architecture_is_not_judged() -> None:
    assert architecture(Gemma3TextConfig(architectures=["Gemma3ForCausalLM"])) == "Gemma3ForCausalLM"
    assert architecture(Gemma3TextConfig()) is None
    assert unserved(None) is None
