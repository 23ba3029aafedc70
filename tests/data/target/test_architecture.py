import pytest
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from data.target.architecture import (
    active_intermediate_size,
    check_architecture,
    count_parameters,
    expert_intermediate_size,
    from_architecture,
)
from eagle31.errors import UserError
from tests.data.target.small_configs import DEEPSEEK, HIDDEN, LAYERS, SMALL, VOCAB


@pytest.mark.parametrize(
    ("config", "active", "single"),
    [
        (LlamaConfig(**SMALL), 48, None),
        (DeepseekV3Config(**DEEPSEEK), (3 + 2) * 16, 16),
        (GptOssConfig(**SMALL, num_local_experts=8, num_experts_per_tok=4), 4 * 48, 48),
        (Qwen3MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=4, moe_intermediate_size=20), 80, 20),
        (
            Qwen2MoeConfig(
                **SMALL,
                num_experts=8,
                num_experts_per_tok=4,
                moe_intermediate_size=20,
                shared_expert_intermediate_size=30,
            ),
            110,
            20,
        ),
    ],
)
def test_active_width_sums_the_experts_of_one_token(
    config: PreTrainedConfig, active: int, single: int | None
) -> None:
    assert active_intermediate_size(config) == active
    assert expert_intermediate_size(config) == single


def test_active_parameters_exclude_other_experts_and_the_embedding() -> None:
    config = DeepseekV3Config(**DEEPSEEK)
    found = count_parameters(config)
    expert = 3 * HIDDEN * 16
    assert found.total - found.active == (LAYERS - 1) * (8 - 3) * expert + VOCAB * HIDDEN
    tied = count_parameters(LlamaConfig(**SMALL, tie_word_embeddings=True))
    assert tied.total == tied.active


def test_an_architecture_is_compared_with_the_config() -> None:
    architecture = {"model_type": "qwen3", "dtype": "bfloat16", **SMALL, "rope_theta": 5000.0}
    check_architecture(architecture, Qwen3Config(**SMALL, rope_theta=5000.0))
    check_architecture({}, LlamaConfig())
    with pytest.raises(UserError, match=r"target\.architecture\.hidden_size=32"):
        check_architecture(architecture, Qwen3Config(**SMALL | {"hidden_size": 64}, rope_theta=5000.0))
    with pytest.raises(UserError, match=r"target\.architecture\.rope_parameters"):
        check_architecture(architecture, Qwen3Config(**SMALL, rope_theta=6000.0))


def test_an_unknown_model_type_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"target\.architecture\.model_type=no_such"):
        from_architecture({"model_type": "no_such"})
