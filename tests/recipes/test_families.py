"""Families of targets on small random models: capture by transformers always, all stages with --full.

The targets of the recipes are captured with --full, too, one of each architecture.
"""

from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn

from data.capture.hf import HiddenStateCapture
from data.generation.hf import generate_batch
from data.sampling import Sampling
from data.target.cached_decoding import TargetDecoder
from data.target.loading import load_target
from data.target.modules import locate
from data.target.parts import load_target_parts
from data.target.spec import TargetSpec
from tests.recipes.families import FAMILIES, TRANSFORMERS, save_family, table_row, try_family
from tests.recipes.stand_ins import save_stand_in
from tests.runs.forked import ROOT

LENGTHS, KEPT, ANSWER_TOKENS = (70, 33), 40, 6
# A recipe of each architecture.
ARCHITECTURES = (
    *("llama3_1_8b", "mistral_small_3_2", "ministral3_8b", "qwen3_8b", "qwen3_30b_a3b", "qwen3_next_80b_a3b"),
    *("qwen3_5_9b", "qwen3_6_35b_a3b", "gpt_oss_20b", "minimax_m2_5", "minimax_m3", "gemma4_26b_a4b"),
    *("kimi_k2_6", "deepseek_v4_flash", "glm_5_2", "nemotron3_nano"),
)


@pytest.mark.parametrize("name", [name for name in FAMILIES if TRANSFORMERS not in FAMILIES[name].missing])
def test_transformers_captures_what_the_layers_give(name: str, tmp_path: Path) -> None:
    assert_captured_as_the_layers_give(save_family(name, tmp_path), FAMILIES[name].layers)


@pytest.mark.full("models with as many layers as the recipes' targets")
@pytest.mark.parametrize("recipe", ARCHITECTURES)
def test_the_layers_of_a_recipes_target_are_captured(recipe: str, tmp_path: Path) -> None:
    # Rounding grows over dozens of random layers.
    assert_captured_as_the_layers_give(save_stand_in(recipe, tmp_path).model, error=1e-3)


def test_each_architecture_of_the_recipes_has_a_stand_in() -> None:
    paths = (ROOT / "recipes" / "architecture").glob("*.yaml")
    kinds = {one.stem: yaml.safe_load(one.read_text())["architecture"]["model_type"] for one in paths}
    assert set(kinds.values()) == {kinds[recipe] for recipe in ARCHITECTURES}


def assert_captured_as_the_layers_give(
    directory: Path, layers_name: str = "model.layers", error: float = 1e-4
) -> None:
    """Compare with hooks, next to each other in a batch, and token by token with a cache.

    Args:
        error: the largest difference, relative to the largest state.
    """
    spec = TargetSpec(str(directory))
    model, parts = load_target(spec, torch.device("cpu")), load_target_parts(spec)
    modules = locate(model)
    aux_layer_ids = tuple(range(parts.num_layers))
    capture = HiddenStateCapture(model, modules, aux_layer_ids)
    batch = [torch.randint(400, (length,), generator=torch.manual_seed(length)) for length in LENGTHS]
    layers, decoder = (model.get_submodule(name) for name in (layers_name, layers_name.rpartition(".")[0]))
    norm = decoder.get_submodule("norm_f" if hasattr(decoder, "norm_f") else "norm")
    for ids, (aux, final) in zip(batch, capture.capture(batch), strict=True):
        given: list[Tensor] = []

        def keep(_module: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            [states] = output[0] if isinstance(output, tuple) else output
            given.append(states.mean(1) if states.dim() == 3 else states)  # noqa: B023

        def keep_input(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            given.append(args[0][0])  # noqa: B023

        hooks = [layer.register_forward_hook(keep) for layer in layers[:-1]]
        hooks += [model.get_input_embeddings().register_forward_hook(keep)]
        hooks += [norm.register_forward_pre_hook(keep_input)]
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0]
            ours = parts.head(final)
        for hook in hooks:
            hook.remove()
        assert len(given) == parts.num_layers + 1
        close = {"rtol": 1e-3, "atol": error * float(aux.abs().max())}
        torch.testing.assert_close(aux, torch.stack(given[:-1], dim=1), **close)
        torch.testing.assert_close(final, given[-1], **close)
        torch.testing.assert_close(ours, logits, **close)

    cached = TargetDecoder(model, modules, aux_layer_ids)
    cached.forward(batch[0][:KEPT])
    cached.forward(batch[1][:5])  # drafts, of which all are rejected
    cached.rollback(KEPT)
    logits, aux = cached.forward(batch[0][KEPT:])
    expected = capture.capture(batch[:1])[0]
    torch.testing.assert_close(
        aux, expected[0][KEPT:], rtol=1e-3, atol=error * float(expected[0].abs().max())
    )
    prompts = [ids.tolist() for ids in batch]
    sampling = Sampling(ANSWER_TOKENS, (), temperature=0.0, seed=0)
    alone = [generate_batch(model, [prompt], sampling, ())[0] for prompt in prompts]
    assert generate_batch(model, prompts, sampling, ()) == alone


@pytest.mark.full("a run of each family, and vLLM twice")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.timeout(1500)
def test_a_family_runs_as_documented(
    name: str, vllm_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE31_VLLM_PYTHON", str(vllm_python))
    assert table_row(name, try_family(name, tmp_path)) in (ROOT / "docs" / "recipes.md").read_text()
