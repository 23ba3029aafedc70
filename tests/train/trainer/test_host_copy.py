import torch

from tests.pretended_gpu.pretended_gpu import CUDA, PretendedGpu
from train.trainer.host_copy import HostCopy, sent


def test_values_of_the_device_are_read_without_a_wait() -> None:
    with PretendedGpu() as gpu, gpu.no_waiting():
        values = sent([3, 1], CUDA)
        assert (values.device, values.dtype) == (CUDA, torch.int64)
        assert len(HostCopy(values).read()) == 2


def test_on_the_cpu_they_are_the_same() -> None:
    assert HostCopy(sent([3, True], torch.device("cpu"))).read() == [3, 1]
