"""What TorchSpec's engines are asked for, and what becomes of the states that they give."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from data.capture.torchspec.engines import TorchSpecSettings
from data.capture.torchspec.transport import norm_scale
from data.target.parts import CapturedTarget
from data.target.spec import TargetSpec
from eagle31.errors import UserError

SIZE = 32


def captured(*aux_layer_ids: int) -> CapturedTarget:
    """Return a target of six layers."""
    parts: Any = SimpleNamespace(num_layers=6, hidden_size=SIZE)
    return CapturedTarget(TargetSpec("a/b"), parts, aux_layer_ids)


def settings(*aux_layer_ids: int, **extra: Any) -> TorchSpecSettings:
    target = captured(*aux_layer_ids or (1, 4))
    return TorchSpecSettings(target, "sgl", 2, gpus_per_engine=4, max_tokens=100, extra=extra)


def test_further_settings_are_torchspecs_own(torchspec: Path) -> None:
    extra = {"inference_batch_size": 8, "sglang": {"extra_args": {"attention_backend": "fa3"}}}
    found = settings(inference=extra).arguments()
    assert (found.inference_batch_size, dict(found.sglang_extra_args)) == (8, {"attention_backend": "fa3"})
    assert found.sglang_tp_size == 4
    assert found.max_seq_length > 100  # SGLang cuts a prompt without room for a token after it


@pytest.mark.parametrize("ids", [(0, 4), (4, 6)], ids=str)
def test_layers_that_torchspec_does_not_give_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"drafter\.aux_layer_ids"):
        settings(*ids)


@pytest.mark.parametrize(
    ("inference", "field"),
    [
        ({"inference_engine_type": "hf"}, "torchspec.config.inference"),
        ({"vllm": {"pp": 2}}, "torchspec.config"),
        ({"vllm": {"pp_size": 2}}, "torchspec.config.inference.vllm.pp_size"),
        ({"inference_batch_size": "many"}, "torchspec.config"),
    ],
)
def test_what_torchspec_cannot_do_is_refused(torchspec: Path, inference: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError, match=field):
        settings(inference=inference).arguments()


def test_the_scale_of_a_norm_undoes_it_up_to_a_factor() -> None:
    norm = LlamaRMSNorm(SIZE)
    with torch.no_grad():
        norm.weight.uniform_(-2.0, 2.0, generator=torch.Generator().manual_seed(0))
        after = norm(torch.randn(5, SIZE, generator=torch.Generator().manual_seed(1)))
        assert torch.allclose(norm(after / norm_scale(norm, SIZE)), after, atol=1e-4)


def test_another_norm_is_refused() -> None:
    norm = nn.LayerNorm(SIZE)
    norm.bias.data.fill_(0.5)
    with pytest.raises(UserError, match=r"torchspec\.engine"):
        norm_scale(norm, SIZE)
