"""The checks on the pretended GPU fail where a fault that a GPU would show is put back into the code."""

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorDeviceMismatchError

from eagle31.kernels import flash_support
from tests.pretended_gpu import test_decoding as decoding
from tests.pretended_gpu import test_loop as loop
from tests.pretended_gpu import test_step as step
from tests.pretended_gpu.faults import Fault, put_back

BF16 = torch.bfloat16
ERRORS = (AssertionError, RuntimeError, DynamicOutputShapeException, FakeTensorDeviceMismatchError)


def one_step() -> None:
    step.test_a_step_never_waits("gqa", BF16, True, 1, True, False)


def notice() -> None:
    step.test_a_notice_names_the_card_once(BF16, (7, 5))


def optimizer_step() -> None:
    loop.test_an_optimizer_step_never_waits(BF16, True, False)


FAULTS: dict[str, tuple[Fault, Callable[[], None], str]] = {
    "a number drawn on the host in rejection sampling": (
        Fault(
            "eagle31.decoding.speculative",
            "torch.rand((), generator=generator, device=generator.device)",
            "torch.rand((), generator=generator)",
        ),
        lambda: decoding.test_speculative_decoding("gqa", BF16, True, 0.7),
        "device type for generator",
    ),
    "FlashAttention on a card without it": (
        Fault("eagle31.kernels.flash_support", "capability < (8, 0)", "capability < (1, 0)"),
        notice,
        "_flash_attention",
    ),
    "the slow path without a word": (
        Fault("eagle31.training.attention_kernels", "warn_once(like.device, obstacle)", "pass"),
        notice,
        "0 == 1",
    ),
    "keys copied for each run": (
        Fault(
            "eagle31.kernels.packed_attention",
            "                wide_keys[call.keys],\n                wide_values[call.keys],\n"
            "                call.query_offsets",
            "                wide_keys[call.keys].clone(),\n                wide_values[call.keys].clone(),\n"
            "                call.query_offsets",
        ),
        step.test_turns_of_a_document_take_no_memory_for_keys,
        "bytes",
    ),
    "the schedule from pageable memory": (
        Fault("eagle31.kernels.transfer", ", pin_memory=True", ""),
        one_step,
        "pageable",
    ),
    "the schedule from the device's batch": (
        Fault(
            "eagle31.training.step",
            "schedule = schedule or schedule_batch(batch, num_steps, key_reach=drafter.config.key_reach)",
            "schedule = schedule_batch(batch, num_steps, key_reach=drafter.config.key_reach)",
        ),
        one_step,
        "to host",
    ),
    "bounds of the loss read from the device": (
        Fault(
            "eagle31.training.fused_loss", "step.teacher_index_host, edges", "step.teacher_index.cpu(), edges"
        ),
        one_step,
        "to host",
    ),
    "the draft vocabulary's rows by a mask": (
        Fault(
            "data.target.head",
            "nn.Parameter(self.weight[ids]",
            "nn.Parameter(self.weight[self.weight[:, 0] > 0]",
        ),
        lambda: step.test_a_step_never_waits("gqa", BF16, True, 1, False, False),
        "nonzero",
    ),
    "a scratch of all steps in the loss": (
        Fault(
            "eagle31.training.fused_loss",
            "num_chains if on_gpu",
            "len(logits) if on_gpu",
        ),
        step.test_the_loss_has_a_scratch_of_one_step,
        "bytes",
    ),
    "a temporary as large as the head": (
        Fault("eagle31.training.fused_loss", "PRODUCT_ELEMENTS // total.shape[1]", "len(total)"),
        step.test_no_temporary_of_the_loss_is_as_large_as_the_head,
        "bytes",
    ),
    "atomic additions": (
        Fault("eagle31.kernels.split_linear", ".index_copy_(0, index, grad)", ".index_add_(0, index, grad)"),
        one_step,
        "atomic",
    ),
    "a table on the host": (
        Fault(
            "eagle31.training.step",
            "torch.full((logits.shape[1],), -1, device=logits.device)",
            "torch.full((logits.shape[1],), -1)",
        ),
        one_step,
        "device between",
    ),
    "the number of supervised positions read before the step": (
        Fault(
            "train.trainer.loop",
            "counts[0].clamp(min=1).double()",
            "torch.tensor(max(counts[0].item(), 1)).double()",
        ),
        optimizer_step,
        "_local_scalar_dense",
    ),
    "counts from pageable memory": (
        Fault("train.trainer.host_copy", "tensor.pin_memory().to(", "tensor.to("),
        optimizer_step,
        "pageable",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    fault, check, message = FAULTS[name]
    flash_support.warn_once.cache_clear()
    with put_back(fault), pytest.raises(ERRORS, match=message):
        check()
