import torch

from eagle31.kernels.transfer import to_device
from tests.pretended_gpu.device import CUDA, PretendedGpu
from train.trainer.host_copy import HostCopy


def test_values_of_the_device_are_read_without_a_wait() -> None:
    with PretendedGpu() as gpu, gpu.no_waiting():
        [values] = to_device([torch.tensor([3, 1])], CUDA)
        assert (values.device, values.dtype) == (CUDA, torch.int64)
        assert len(HostCopy(values).read()) == 2


def test_on_the_cpu_they_are_the_same() -> None:
    [values] = to_device([torch.tensor([3, 1])], torch.device("cpu"))
    assert HostCopy(values).read() == [3, 1]
