"""What TorchSpec's engines are asked for, and what becomes of the states that they give."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from data.capture.torchspec.engines import TorchSpecSettings
from data.capture.torchspec.transport import norm_scale
from eagle31.errors import UserError

SIZE = 32


def settings(**changed: Any) -> TorchSpecSettings:
    fields = {"engine": "sgl", "num_engines": 2, "gpus_per_engine": 4, "target": "model", "max_tokens": 100}
    fields |= {"trust_remote_code": False, "aux_layer_ids": (1, 4), "num_layers": 6, "hidden_size": SIZE}
    return TorchSpecSettings(**{**fields, **changed})


def test_further_settings_are_torchspecs_own(torchspec: Path) -> None:
    extra = {"inference": {"inference_batch_size": 8, "sglang": {"extra_args": {"attention_backend": "fa3"}}}}
    found = settings(extra=extra).arguments()
    assert (found.inference_batch_size, dict(found.sglang_extra_args)) == (8, {"attention_backend": "fa3"})
    assert found.sglang_tp_size == 4
    assert found.max_seq_length > 100  # SGLang cuts a prompt without room for a token after it


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"aux_layer_ids": (0, 4)}, "drafter.aux_layer_ids"),
        ({"aux_layer_ids": (4, 6)}, "drafter.aux_layer_ids"),
        ({"extra": {"inference": {"inference_engine_type": "hf"}}}, "torchspec.config.inference"),
        ({"extra": {"inference": {"vllm": {"pp": 2}}}}, "torchspec.config"),
        ({"extra": {"inference": {"vllm": {"pp_size": 2}}}}, "torchspec.config.inference.vllm.pp_size"),
        ({"extra": {"inference": {"inference_batch_size": "many"}}}, "torchspec.config"),
    ],
)
def test_what_torchspec_cannot_do_is_refused(torchspec: Path, changed: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError, match=field):
        settings(**changed).arguments()


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
