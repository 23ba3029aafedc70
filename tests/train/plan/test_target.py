"""The memory of a GPU that runs the target in vLLM."""

import pytest

from eagle31.errors import UserError
from tests.train.torchrun import composed
from train.plan.sizes import RunSizes
from train.plan.target import Parallelism, ServerMemory, longest_prompt, server_memory


def memory(recipe: str, tensor: int = 1, data: int = 1) -> ServerMemory:
    sizes = RunSizes(composed(recipe))
    return server_memory(sizes.config, sizes.target_config, sizes.target, Parallelism(tensor, data, True))


def test_the_embedded_target_has_its_shape_in_the_quickstart_alone() -> None:
    assert RunSizes(composed("quickstart")).target_config.hidden_size == 128
    with pytest.raises(UserError, match=r"target\.model=embedded: .*give recipe=quickstart"):
        _ = RunSizes(composed("any_target", "target.model=embedded", "data.train=embedded")).target_config


def test_tensor_parallelism_splits_all_weights_and_data_parallelism_only_routed_experts() -> None:
    size = RunSizes(composed("kimi_k2_6")).target
    assert size.checkpoint_bytes == 595 * 10**9
    assert size.expert_bytes / size.checkpoint_bytes == pytest.approx(0.96, abs=0.02)
    assert memory("kimi_k2_6", 8).weights == pytest.approx(595e9 / 8)
    others = size.checkpoint_bytes - size.expert_bytes
    assert memory("kimi_k2_6", 1, 8).weights == pytest.approx(size.expert_bytes / 8 + others)
    assert memory("kimi_k2_6", 4, 2).weights == pytest.approx(size.expert_bytes / 8 + others / 4, rel=1e-6)


def test_a_dense_target_has_no_experts_and_a_copy_in_every_engine() -> None:
    assert RunSizes(composed("qwen3_8b")).target.expert_bytes == 0
    assert memory("qwen3_8b", 2, 4).weights == memory("qwen3_8b", 2, 1).weights
    assert memory("qwen3_8b", 2, 1).weights == pytest.approx(16.4e9 / 2)


def test_a_sequence_holds_keys_values_and_hidden_states() -> None:
    tokens = 1 + longest_prompt(composed("qwen3_8b"))
    # 36 layers of 8 heads of 128, and three aux layers and the final one of 4,096, in 16 bits.
    assert memory("qwen3_8b").sequence == tokens * (36 * 2 * 8 * 128 * 2 + 4 * 4096 * 2)
    assert memory("qwen3_8b", 8).sequence == tokens * (36 * 2 * 1 * 128 * 2 + 4 * 4096 * 2)
    # Latent attention is not split, and a target with two kinds of attention pays for the layers of one kind.
    tokens = 1 + longest_prompt(composed("kimi_k2_6"))
    assert memory("kimi_k2_6", 8).sequence == tokens * (61 * 576 * 2 + 4 * 7168 * 2)
    tokens = 1 + longest_prompt(composed("gpt_oss_20b"))
    assert memory("gpt_oss_20b").sequence == tokens * (24 * 2 * 8 * 64 * 2 + 12 * 4 * 2880 * 2)


def test_regenerated_samples_are_cut_after_they_are_written() -> None:
    plain = longest_prompt(composed("qwen3_8b", "data.regenerate.enabled=false"))
    written = ("data.regenerate.enabled=true", "data.regenerate.max_new_tokens=9000", "data.max_tokens=2048")
    assert longest_prompt(composed("qwen3_8b", *written)) == 2048 + 9000 > plain


def test_parallelism_comes_from_the_engines_arguments() -> None:
    arguments = {"tensor_parallel_size": 2, "data_parallel_size": 16, "data_parallel_size_local": 8}
    assert Parallelism.of(arguments) == Parallelism(2, 8, True)
