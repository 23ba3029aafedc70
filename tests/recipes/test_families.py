"""Families of targets on small random models: capture by transformers always, all stages with --full."""

from pathlib import Path

import pytest
import torch
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
from tests.runs.forked import ROOT

LENGTHS, KEPT, ANSWER_TOKENS = (70, 33), 40, 6


@pytest.mark.parametrize("name", [name for name in FAMILIES if TRANSFORMERS not in FAMILIES[name].missing])
def test_transformers_captures_what_the_layers_give(name: str, tmp_path: Path) -> None:
    family, spec = FAMILIES[name], TargetSpec(str(save_family(name, tmp_path)))
    model, parts = load_target(spec, torch.device("cpu")), load_target_parts(spec)
    modules = locate(model)
    aux_layer_ids = tuple(range(parts.num_layers))
    capture = HiddenStateCapture(model, modules, aux_layer_ids)
    batch = [torch.randint(400, (length,), generator=torch.manual_seed(length)) for length in LENGTHS]
    layers = model.get_submodule(family.layers)
    norm = model.get_submodule(f"{family.layers.rpartition('.')[0]}.norm")
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
        close = {"rtol": 1e-3, "atol": 1e-4 * float(aux.abs().max())}
        torch.testing.assert_close(aux, torch.stack(given[:-1], dim=1), **close)
        torch.testing.assert_close(final, given[-1], **close)
        torch.testing.assert_close(ours, logits, **close)

    decoder = TargetDecoder(model, modules, aux_layer_ids)
    decoder.forward(batch[0][:KEPT])
    decoder.forward(batch[1][:5])  # drafts, of which all are rejected
    decoder.rollback(KEPT)
    logits, aux = decoder.forward(batch[0][KEPT:])
    expected = capture.capture(batch[:1])[0]
    torch.testing.assert_close(aux, expected[0][KEPT:], rtol=1e-3, atol=1e-4 * float(expected[0].abs().max()))
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
