"""Checkpoints of random targets with a few thousand parameters."""

from pathlib import Path

import torch
from datasets import Dataset
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from data.capture.hf import HiddenStateCapture
from data.target.loading import load_target
from data.target.modules import locate
from data.target.spec import TargetSpec

VOCAB_SIZE, HIDDEN_SIZE, NUM_LAYERS = 100, 32, 5
AUX_LAYER_IDS = (0, 2, 5)


def save_target(
    directory: Path, family: str = "llama", tied: bool = False, sharded: bool = False
) -> TargetSpec:
    """Save a float32 target whose norm weights are not 1, so that a forgotten norm changes the result."""
    config_class, model_class = {
        "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[family]
    config = config_class(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        eos_token_id=2,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = model_class(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    save_model(model, directory, sharded)
    return TargetSpec(model=str(directory))


def save_model(model: PreTrainedModel, directory: Path, sharded: bool = False) -> None:
    model.save_pretrained(directory, max_shard_size="20KB" if sharded else "1GB")


def make_capture(spec: TargetSpec, aux_layer_ids: tuple[int, ...] = AUX_LAYER_IDS) -> HiddenStateCapture:
    model = load_target(spec, torch.device("cpu"))
    return HiddenStateCapture(model, locate(model), aux_layer_ids)


def make_dataset(num_samples: int = 12, seed: int = 0) -> Dataset:
    """Make samples of 3 to 20 random tokens; the first two tokens are the prompt."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 21, (num_samples,), generator=generator).tolist()
    ids = [torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    masks = [[False, False] + [True] * (length - 2) for length in lengths]
    return Dataset.from_dict({"input_ids": ids, "loss_mask": masks})


def final_hidden_and_logits(spec: TargetSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the full model; return the input of its final norm [1, T, Ht] and its logits [1, T, V]."""
    model = load_target(spec, torch.device("cpu"))
    kept = []
    hook = locate(model).final_norm.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    with torch.no_grad():
        logits = model(input_ids=torch.arange(10)[None]).logits
    hook.remove()
    return kept[0], logits
