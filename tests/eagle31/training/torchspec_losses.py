"""Computes the losses of TorchSpec's Eagle3Model per row and step, and their gradients, in its environment.

torchspec_losses.py INPUT.safetensors OUTPUT.safetensors
"""

import sys
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchspec.models.draft.llama3_eagle import LlamaForCausalLMEagle3
from torchspec.models.eagle3 import Eagle3Model, compute_lazy_target_padded, compute_target_p_padded
from torchspec.utils.tensor import padding
from transformers import LlamaConfig


def build(given: dict[str, Tensor]) -> LlamaForCausalLMEagle3:
    shape: dict[str, Any] = {
        name.removeprefix("config."): value.item() for name, value in given.items() if "config." in name
    }
    pruned = shape["draft_vocab_size"] < shape["vocab_size"]
    drafter = LlamaForCausalLMEagle3(LlamaConfig(**shape, pad_token_id=None), attention_backend="sdpa")
    weights = {name.removeprefix("drafter."): value for name, value in given.items() if "drafter." in name}
    if pruned:
        weights |= {"t2d": given["t2d"], "d2t": torch.zeros(shape["draft_vocab_size"], dtype=torch.int64)}
    drafter.load_state_dict(weights)
    return drafter


def main(source: str, target: str) -> None:
    given = load_file(source)
    drafter = build(given)
    num_steps = int(given["num_steps"])
    model = Eagle3Model(drafter, length=num_steps, attention_backend="sdpa")
    num_tokens = len(given["input_ids"])
    # As in its trainer, token and teacher of row t are those of t + 1.
    last = padding(given["last"][None], left=False)
    if "t2d" in given:
        everywhere = torch.ones(1, num_tokens)
        teacher = compute_target_p_padded(last, given["target_head"], given["t2d"], everywhere, num_steps)
        teacher = replace(teacher, position_mask=None)  # which leaves out tokens outside the draft vocabulary
    else:
        teacher = compute_lazy_target_padded(last, given["target_head"], num_steps)

    def losses(mask: Tensor) -> list[Tensor]:
        per_step, _, _ = model(
            padding(given["input_ids"][None], left=False),
            torch.ones(1, num_tokens, dtype=torch.long),
            teacher,
            mask[None],
            given["aux"][None],
        )
        return per_step

    # Its mask moves with the steps: index j is row j - k at step k.
    table = torch.zeros(num_tokens, num_steps)
    with torch.no_grad():
        for j in range(num_tokens):
            mask = torch.zeros(num_tokens)
            mask[j] = 1
            for step, loss in enumerate(losses(mask)):
                if j >= step:
                    table[j - step, step] = loss
    # All rows whose prediction is within the document; its losses are means.
    mask = (torch.arange(num_tokens) < num_tokens - 2).float()
    weights = [given["step_decay"] ** k * (num_tokens - 2 - k) for k in range(num_steps)]
    torch.stack([w * loss for w, loss in zip(weights, losses(mask), strict=True)]).sum().backward()
    found = {f"gradient.{name}": p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    found["losses"] = table
    save_file(found, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
