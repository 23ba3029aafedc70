import json

import pytest

from eagle31.config import DrafterConfig
from eagle31.errors import UserError
from tests.eagle31.tiny import tiny_config

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e4}, LLAMA3])
def test_json_round_trip(rope: dict) -> None:
    config = tiny_config(rope_parameters=rope, norm_before_residual=True)
    assert DrafterConfig.from_json(json.loads(json.dumps(config.to_json("bfloat16")))) == config


def test_json_has_what_vllm_reads() -> None:
    written = tiny_config(aux_layer_ids=(1, 4)).to_json("float32")
    assert written["architectures"] == ["LlamaForCausalLMEagle3"]
    assert written["model_type"] == "llama"
    assert written["eagle_aux_hidden_state_layer_ids"] == [1, 4]
    assert written["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [1, 4],
        "use_aux_hidden_state": True,
    }
    assert written["num_aux_hidden_states"] == 2
    assert (written["fc_norm"], written["norm_output"], written["norm_before_residual"]) == (
        True,
        True,
        False,
    )
    assert written["tie_word_embeddings"] is False
    assert written["torch_dtype"] == "float32"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"aux_layer_ids": (3, 1)}, "drafter.aux_layer_ids"),
        ({"aux_layer_ids": ()}, "drafter.aux_layer_ids"),
        ({"num_key_value_heads": 3}, "drafter.num_key_value_heads"),
        ({"head_dim": 5}, "drafter.head_dim"),
        ({"draft_vocab_size": 62}, "drafter.draft_vocab_size"),
        ({"num_hidden_layers": 0}, "drafter.num_hidden_layers"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict, field: str) -> None:
    with pytest.raises(UserError) as raised:
        tiny_config(**changes)
    assert raised.value.field == field


@pytest.mark.parametrize("key", ["eagle_aux_hidden_state_layer_ids", "fc_norm", "rope_theta"])
def test_missing_keys_are_refused(key: str) -> None:
    written = tiny_config().to_json("float32")
    del written[key]
    with pytest.raises(UserError, match=r"config\.json"):
        DrafterConfig.from_json(written)
