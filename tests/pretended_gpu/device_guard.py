"""A device guard for "cuda" in a build of PyTorch without CUDA.

Indexing and `Tensor.to` ask for the guard of the tensor's device. A build without CUDA has none, so they fail
on tensors of `FakeTensorMode` too. A build with CUDA but without a GPU replaces its guard with one that does
nothing, by `torch._C._ensureCUDADeviceGuardSet`. That function refuses where there is no guard at all, so one
that reports no device is registered first.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_CUDA = 1  # c10::DeviceType::CUDA
_REGISTER = "_ZN3c104impl19registerDeviceGuardENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"
_MOST_METHODS = 128  # more than the interface has

_answer_zero = ctypes.CFUNCTYPE(ctypes.c_int64)(lambda: 0)
_methods = (ctypes.c_void_p * _MOST_METHODS)(
    *[ctypes.cast(_answer_zero, ctypes.c_void_p).value] * _MOST_METHODS
)
# A C++ object without fields: the address of its table of methods, each of which returns 0.
_guard_without_devices = ctypes.c_void_p(ctypes.addressof(_methods))


@contextmanager
def cuda_device_guard() -> Iterator[None]:
    """Have a guard for "cuda" that does nothing, where PyTorch is built without CUDA.

    It is removed again, because autograd's engine starts a thread for each device that has a guard.
    """
    if torch.backends.cuda.is_built():
        yield
        return
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    register = getattr(library, _REGISTER)
    register(ctypes.c_int8(_CUDA), ctypes.byref(_guard_without_devices))
    torch._C._ensureCUDADeviceGuardSet()
    try:
        yield
    finally:
        register(ctypes.c_int8(_CUDA), None)
