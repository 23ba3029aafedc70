"""Tokens that the target lacks, and weights that are not finite."""

import pytest
import torch

from data.capture.hf import HiddenStateCapture, check_head
from data.embedded.target import EmbeddedTarget
from data.target.head import TargetHead
from data.target.loading import load_target
from data.target.modules import locate
from data.target.spec import TargetSpec
from data.target.tokenizer import check_ids
from eagle31.errors import UserError
from tests.data.conversations.chat_templates import CHATML, byte_level_tokenizer


def test_a_token_that_the_target_lacks_is_named() -> None:
    tokenizer = byte_level_tokenizer(CHATML)
    check_ids(tokenizer, [], 10)
    check_ids(tokenizer, [3, 9], 10)
    with pytest.raises(UserError, match=r"The model has 10 tokens.* gives token 11 "):
        check_ids(tokenizer, [3, 11], 10)


def test_a_target_with_damaged_weights_is_not_said_to_scale_its_logits(small_target: EmbeddedTarget) -> None:
    spec = TargetSpec(str(small_target.model))
    model = load_target(spec, torch.device("cpu"))
    modules = locate(model)
    head = TargetHead(modules.final_norm, modules.lm_head)
    capture = HiddenStateCapture(model, modules, [1])
    check_head(capture, head)
    modules.layers[0].get_parameter("mlp.up_proj.weight").fill_(torch.nan)
    with pytest.raises(UserError, match="Its logits are not finite"):
        check_head(capture, head)
