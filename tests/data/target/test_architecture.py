import pytest
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
)

from data.target.architecture import (
    active_intermediate_size,
    count_parameters,
    from_architecture,
)
from eagle31.errors import UserError
from tests.data.target.small_configs import DEEPSEEK, HIDDEN, LAYERS, SMALL, VOCAB


@pytest.mark.parametrize(
    ("config", "active"),
    [
        (LlamaConfig(**SMALL), 48),
        (DeepseekV3Config(**DEEPSEEK), (3 + 2) * 16),
        (GptOssConfig(**SMALL, num_local_experts=8, num_experts_per_tok=4), 4 * 48),
        (
            Qwen2MoeConfig(
                **SMALL,
                num_experts=8,
                num_experts_per_tok=4,
                moe_intermediate_size=20,
                shared_expert_intermediate_size=30,
            ),
            110,
        ),
    ],
)
def test_active_width_sums_the_experts_of_one_token(config: PreTrainedConfig, active: int) -> None:
    assert active_intermediate_size(config) == active


def test_active_parameters_exclude_other_experts_and_the_embedding() -> None:
    config = DeepseekV3Config(**DEEPSEEK)
    found = count_parameters(config)
    expert = 3 * HIDDEN * 16
    assert found.total - found.active == (LAYERS - 1) * (8 - 3) * expert + VOCAB * HIDDEN
    tied = count_parameters(LlamaConfig(**SMALL, tie_word_embeddings=True))
    assert tied.total == tied.active


def test_an_unknown_model_type_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"target\.architecture\.model_type=no_such"):
        from_architecture({"model_type": "no_such"})
