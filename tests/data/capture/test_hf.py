from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import CohereConfig, CohereForCausalLM

from data.capture.hf import check_head
from data.target.head import TargetHead
from data.target.spec import TargetSpec
from eagle31.errors import UserError
from tests.data.target.tiny_target import (
    HIDDEN_SIZE,
    NUM_LAYERS,
    VOCAB_SIZE,
    make_capture,
    save_model,
    save_target,
)


def _batch(lengths: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_ids_are_hugging_faces_hidden_states(tmp_path: Path, family: str) -> None:
    spec = save_target(tmp_path, family)
    capture = make_capture(spec, tuple(range(NUM_LAYERS + 1)))
    [ids] = _batch((9,))
    [(aux, last)] = capture.capture([ids])
    assert aux.shape == (9, NUM_LAYERS + 1, HIDDEN_SIZE)
    with torch.no_grad():
        theirs = capture.model(input_ids=ids[None], output_hidden_states=True).hidden_states
        before_norm = capture.modules.layers[-1](
            theirs[NUM_LAYERS - 1],
            position_embeddings=capture.modules.decoder.rotary_emb(theirs[0], torch.arange(9)[None]),
        )
        after_norm = capture.modules.final_norm(aux[:, NUM_LAYERS])
    for i in range(NUM_LAYERS):
        torch.testing.assert_close(aux[:, i], theirs[i][0], rtol=0, atol=0)
    torch.testing.assert_close(aux[:, NUM_LAYERS], before_norm[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after_norm, theirs[NUM_LAYERS][0], rtol=0, atol=0)
    torch.testing.assert_close(last, aux[:, NUM_LAYERS], rtol=0, atol=0)


def test_attention_has_no_mask_which_would_grow_with_the_square_of_the_length(tmp_path: Path) -> None:
    capture, masks = make_capture(save_target(tmp_path)), []
    for layer in capture.modules.layers:
        layer.register_forward_pre_hook(
            lambda _, __, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
        )
    capture.capture(_batch((9,)))
    capture.capture(_batch((9, 5)))
    assert masks == [None] * 2 * NUM_LAYERS


def test_states_can_be_trained_on(tmp_path: Path) -> None:
    [(aux, last)] = make_capture(save_target(tmp_path)).capture(_batch((4,)))
    weight = torch.ones(HIDDEN_SIZE, requires_grad=True)
    (aux.sum(dim=1) * weight + last * weight).sum().backward()  # inference tensors raise here
    torch.testing.assert_close(weight.grad, aux.sum(dim=(0, 1)) + last.sum(dim=0))


def test_hooks_are_removed_and_the_lm_head_is_not_run(tmp_path: Path) -> None:
    capture = make_capture(save_target(tmp_path))
    capture.modules.lm_head.register_forward_pre_hook(lambda *_: pytest.fail("the lm_head was run"))
    capture.capture(_batch((4,)))
    assert not any(layer._forward_pre_hooks for layer in capture.modules.layers)
    assert not capture.modules.final_norm._forward_pre_hooks


def test_head_check_finds_scaled_logits(tmp_path: Path) -> None:
    config = CohereConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        logit_scale=0.0625,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    save_model(CohereForCausalLM(config), tmp_path)
    capture = make_capture(TargetSpec(str(tmp_path)), (0, 1))
    head = TargetHead(capture.modules.final_norm, capture.modules.lm_head)
    with pytest.raises(UserError, match="CohereForCausalLM differ"):
        check_head(capture, head)


def test_the_head_may_be_in_float32_where_the_target_is_in_bfloat16(tmp_path: Path) -> None:
    capture = make_capture(TargetSpec(save_target(tmp_path).model, dtype="bfloat16"), (0, 1))
    check_head(capture, deepcopy(TargetHead(capture.modules.final_norm, capture.modules.lm_head)).float())
