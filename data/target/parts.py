"""The few tensors of a target that training needs, read without loading the model."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig

from data.target.checkpoint import read_modules
from data.target.head import TargetHead, logit_scale
from data.target.loading import check_attention, compute_dtype, load_config, meta_model
from data.target.modules import locate
from data.target.spec import TargetSpec
from eagle31.errors import UserError


@dataclass(frozen=True)
class TargetParts:
    """The tensors and properties of a target that training on captured hidden states needs."""

    config: PreTrainedConfig
    embed_tokens: Tensor  # [V, Ht]
    head: TargetHead
    num_layers: int
    has_mtp_head: bool  # whether the checkpoint has a multi-token prediction head
    hidden_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]  # empty if the checkpoint names none
    sampling: dict[str, Any]  # as the generation config recommends it; fields of `data.sampling.Sampling`
    fingerprint: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which every engine computes the target, and in which its states are captured."""
        return self.embed_tokens.dtype

    @property
    def dtype_name(self) -> str:
        """Its name, such as bfloat16."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class CapturedTarget:
    """The frozen target, the few tensors of it that training needs, and the layers that are captured."""

    spec: TargetSpec
    parts: TargetParts
    aux_layer_ids: tuple[int, ...]

    @property
    def num_aux_layers(self) -> int:
        return len(self.aux_layer_ids)


def load_target_parts(spec: TargetSpec) -> TargetParts:
    """Read only the embedding, final norm and lm_head from the safetensors checkpoint, on the CPU.

    The tensors' names are found in a model that is built on the meta device.

    Raises:
        UserError: the checkpoint has no safetensors, or lacks these tensors in a plain floating-point dtype
            and the shapes of its config.json; or a value is not finite.
    """
    check_attention(spec)
    generation = _generation_config(spec)
    config = load_config(spec)
    model = meta_model(config, spec)
    modules = locate(model)
    softcap = getattr(config.get_text_config(), "final_logit_softcapping", None)
    scale = logit_scale(model, modules, softcap)
    needed = (modules.embed_tokens, modules.final_norm, modules.lm_head)
    states = read_modules(spec.checkpoint, model, needed)
    for module, state, part in zip(needed, states, ("embedding", "final norm", "head"), strict=True):
        _check_shapes(module, state, spec)
        _check_finite(part, state, spec)
    embedding, norm, lm_head = states
    dtype = compute_dtype(spec, config) or embedding["weight"].dtype
    head = TargetHead(_filled(modules.final_norm, norm), _filled(modules.lm_head, lm_head), softcap, scale)
    return TargetParts(
        config=config,
        embed_tokens=embedding["weight"].to(dtype),
        head=head.to(dtype).eval(),
        num_layers=len(modules.layers),
        has_mtp_head=spec.checkpoint.has_mtp_head(len(modules.layers)),
        hidden_size=head.weight.shape[1],
        vocab_size=head.weight.shape[0],
        eos_token_ids=_eos_token_ids(generation, config),
        sampling=_sampling(generation),
        fingerprint=spec.checkpoint.fingerprint(),
    )


def _check_shapes(module: nn.Module, state: dict[str, Tensor], spec: TargetSpec) -> None:
    """Raise UserError for weights of other shapes than config.json gives them."""
    for name, expected in module.state_dict().items():
        if state[name].shape != expected.shape:
            remedy = (
                f"Its weights have a {name} of shape {list(state[name].shape)} where config.json means "
                f"{list(expected.shape)}; the two belong to different models."
            )
            raise UserError("target.model", spec.model, remedy)


def _check_finite(part: str, state: dict[str, Tensor], spec: TargetSpec) -> None:
    """Raise UserError for NaN and infinite weights, with which no hidden state is one."""
    for name, weight in state.items():
        num_damaged = 0 if weight.isfinite().all() else weight.numel() - int(weight.isfinite().sum())
        if num_damaged:
            remedy = (
                f"{num_damaged:,} values of the {name} of its {part} are not finite: its files are damaged; "
                "download them again."
            )
            raise UserError("target.model", spec.model, remedy)


def _filled(module: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    module = copy.deepcopy(module)
    module.load_state_dict(state, assign=True)
    return module


def _generation_config(spec: TargetSpec) -> GenerationConfig:
    path = spec.checkpoint.find_file("generation_config.json")
    with spec.checkpoint.loading():
        return GenerationConfig() if path is None else GenerationConfig.from_pretrained(path.parent)


def _sampling(generation: GenerationConfig) -> dict[str, Any]:
    """Return the recommended sampling: as vLLM does, at temperature 1 where nothing else is said."""
    if generation.do_sample is False:
        return {"temperature": 0.0}
    named = {name: getattr(generation, name) for name in ("top_k", "top_p", "min_p", "repetition_penalty")}
    recommended = {name: value for name, value in named.items() if value is not None}
    temperature = 1.0 if generation.temperature is None else generation.temperature
    return recommended | {"temperature": temperature, "top_k": max(recommended.get("top_k", 0), 0)}


def _eos_token_ids(generation: GenerationConfig, config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the end-of-sequence ids, preferably those of the generation config.

    Chat models end a turn with other tokens than a document.
    """
    eos = generation.eos_token_id
    if eos is None:
        eos = getattr(config.get_text_config(), "eos_token_id", None)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)
