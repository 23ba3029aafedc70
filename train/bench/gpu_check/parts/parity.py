"""The step on the device against the reference on the CPU, in float64: loss and gradients."""

import torch

from train.bench.gpu_check.record import Options, Record
from train.bench.step.device_check import check_device


def run(options: Options, record: Record) -> None:
    for one in check_device(torch.device(options.device_type)):
        worst = max(one.loss_error, one.gradient_error)
        record.figure(f"largest error, {one.variant}, {one.dtype}", f"{worst:.1e}")
        detail = (
            f"loss off by {one.loss_error:.1e}, gradients by {one.gradient_error:.1e} ({one.parameter}); "
            f"bound {one.bound:.0e}"
        )
        record.check(f"{one.variant}, {one.dtype}", one.passed, detail)
