from typing import Any

import pytest

from eagle31.errors import UserError
from eagle31.export.config_json import config_json
from eagle31.export.layouts import Layout, Verifier
from tests.eagle31.tiny import tiny_config

VERIFIER = Verifier("org/target", ("Qwen3ForCausalLM",), 3)


def test_a_speculators_config_is_what_vllm_serve_reads() -> None:
    raw: dict[str, Any] = config_json(tiny_config(), Layout.speculators, "float32", VERIFIER)
    assert "model_type" not in raw  # with it, vLLM would not read a speculators checkpoint
    assert raw["speculators_model_type"] == "eagle3"
    spec = raw["speculators_config"]
    assert spec["verifier"]["name_or_path"] == "org/target"
    assert spec["proposal_methods"][0]["speculative_tokens"] == 3
    # vLLM reads these from the top level alone, norm_before_residual with a default of true.
    assert (raw["fc_norm"], raw["norm_output"], raw["norm_before_residual"]) == (True, True, False)
    assert raw["transformer_layer_config"]["num_aux_hidden_states"] == 3


def test_sglang_reads_ids_that_are_one_lower() -> None:
    raw = config_json(tiny_config(aux_layer_ids=(2, 4)), Layout.sglang, "float32")
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 4]  # vLLM reads these, and SGLang those
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3]


def test_states_of_the_drafters_width_that_sglang_would_take_without_fc_are_refused() -> None:
    with pytest.raises(UserError, match=r"drafter\.aux_layer_ids="):
        config_json(tiny_config(aux_layer_ids=(2,), target_hidden_size=16), Layout.sglang, "float32")
