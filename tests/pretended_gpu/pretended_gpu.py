"""A GPU that is not there: tensors on "cuda" have shapes, dtypes and strides, and no values.

Tensors on the CPU are real and their operations are computed. Tensors on "cuda" are those of PyTorch's
`FakeTensorMode`, which checks the arguments of every operation as the device does. Every call for which the
host would wait for a GPU is recorded. What is copied from the device has arbitrary values.
"""

import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map

from eagle31.kernels.elementwise import _RMSNorm
from eagle31.training.batch import PackedBatch
from tests.pretended_gpu.device_guard import cuda_device_guard

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
CUDA = torch.device("cuda", 0)
aten = torch.ops.aten

# Operations that read whole tensors on the host, or whose result has a shape that depends on values.
_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


@dataclass(frozen=True)
class Wait:
    """A call for which the host waits for the device, or may have to."""

    kind: (
        str  # "read", "shape", "to host", "from host", "synchronize"; "pageable" for a copy that is not async
    )
    operation: str
    place: str  # file and line in the project

    def __str__(self) -> str:
        return f"{self.kind}: {self.operation} at {self.place}"


class PretendedGpu(TorchDispatchMode):
    """Run what is inside on a GPU that is not there.

    Args:
        capability: the card's compute capability.
        name: the card's name.
        seed: of the values of what is copied to the host.
    """

    def __init__(
        self, capability: tuple[int, int] = (9, 0), name: str = "NVIDIA H100", seed: int = 0
    ) -> None:
        super().__init__()
        major, minor = capability
        self.properties = SimpleNamespace(major=major, minor=minor, name=name, total_memory=80 * 2**30)
        self.waits: list[Wait] = []
        self.operations: list[Any] = []  # of the device, in order
        self.fake = FakeTensorMode()
        self.values = torch.Generator().manual_seed(seed)
        self._pinned: dict[int, torch.UntypedStorage] = {}
        self._exits = ExitStack()

    @property
    def synchronisations(self) -> list[Wait]:
        """Return the calls for which the host waits for the device."""
        return [wait for wait in self.waits if wait.kind != "pageable"]

    @contextmanager
    def no_waiting(self, allowed: int = 0) -> Iterator[None]:
        """Fail if the host waits for the device more than `allowed` times, or copies pageable memory."""
        before = len(self.waits)
        yield
        found = self.waits[before:]
        synchronisations = [wait for wait in found if wait.kind != "pageable"]
        assert len(synchronisations) <= allowed, "\n".join(map(str, found))
        assert len(synchronisations) == len(found), "\n".join(map(str, found))

    def __enter__(self) -> "PretendedGpu":
        with ExitStack() as stack:
            stack.enter_context(cuda_device_guard())
            for patch in self._patches():
                stack.enter_context(patch)
            stack.enter_context(self.fake)
            super().__enter__()
            self._exits = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._exits.__exit__(*error)

    def _patches(self) -> list[AbstractContextManager[Any]]:
        def synchronize(*_: Any) -> None:
            self._wait("synchronize", "torch.cuda.synchronize")

        stream = mock.MagicMock(name="stream")
        stream.synchronize.side_effect = synchronize
        event = mock.MagicMock(name="event", return_value=mock.MagicMock())
        event.return_value.synchronize.side_effect = synchronize
        event.return_value.elapsed_time.return_value = 1.0

        def record_stream(tensor: Tensor, _: Any) -> None:
            assert isinstance(tensor, FakeTensor), "not a tensor of the GPU"
            self.operations.append(aten.record_stream.default)

        replaced = {
            "get_device_properties": lambda *_: self.properties,
            "get_device_capability": lambda *_: (self.properties.major, self.properties.minor),
            "get_device_name": lambda *_: self.properties.name,
            "current_device": lambda: 0,
            "set_device": lambda *_: None,
            "synchronize": synchronize,
            "current_stream": lambda *_: stream,
            "Stream": lambda *_, **__: stream,
            "stream": lambda *_: nullcontext(),
            "Event": event,
        }
        return [
            mock.patch.object(torch, "rms_norm", _fused_rms_norm(torch.rms_norm)),
            mock.patch.object(FakeTensor, "tolist", lambda tensor: self._read(tensor)),
            mock.patch.object(torch.Tensor, "record_stream", record_stream),
            mock.patch.object(torch.backends.cuda, "is_flash_attention_available", return_value=True),
            *(mock.patch.object(torch.cuda, key, value) for key, value in replaced.items()),
        ]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if not tree_any(_on_gpu, (args, kwargs)):
            return self._on_host(func, args, kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            # Inference mode dispatches an operation before it is taken apart.
            TorchDispatchMode.__enter__(self)
            try:
                return func.decompose(*args, **kwargs)
            finally:
                TorchDispatchMode.__exit__(self, None, None, None)
        self.operations.append(func)
        if func in (aten._to_copy.default, aten.copy_.default):
            return self._copy(func, args, kwargs)
        if func in _READS:
            self._wait("read", func)
            answer = self._answer((), torch.bool if func is aten.equal.default else args[0].dtype)
            with unset_fake_temporarily():
                return answer.item()
        if func in _INDEXED:
            self._check_indices(func, args)
        try:
            return func(*self._pretended(args), **self._pretended(kwargs))
        except DynamicOutputShapeException:
            self._wait("shape", func)
            raise

    def _read(self, tensor: Tensor) -> Any:
        """Return a tensor's values as lists; the real method reads all of them in one copy."""
        self._wait("read", "Tensor.tolist")
        answer = self._answer(tensor.shape, tensor.dtype)
        with unset_fake_temporarily():
            return answer.tolist()

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        with unset_fake_temporarily():
            if func is aten.is_pinned.default:
                return self._is_pinned(args[0])
            if func is aten._pin_memory.default:
                return self._pin(args[0].clone())
            pin = kwargs.pop("pin_memory", None)
            result = func(*args, **kwargs)
            return self._pin(result) if pin else result

    def _pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = storage
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    def _copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is aten.copy_.default:
            target, source, *rest = args
            non_blocking = kwargs.get("non_blocking", bool(rest and rest[0]))
            to_gpu, dtype = isinstance(target, FakeTensor), target.dtype
        else:
            source, target = args[0], None
            non_blocking = kwargs.get("non_blocking", False)
            to_gpu = torch.device(kwargs.get("device") or source.device).type == "cuda"
            dtype = kwargs.get("dtype") or source.dtype
        if to_gpu:
            if not isinstance(source, FakeTensor) and source.numel():
                self._from_host(func, source, dtype, non_blocking)
            return func(*self._pretended(args), **self._pretended(kwargs))
        # Without a target, a non-blocking copy is to new pinned memory.
        waits = not non_blocking or (target is not None and not self._is_pinned(target))
        if waits and source.numel():
            self._wait("to host", func)
        with unset_fake_temporarily():
            answer = self._answer(source.shape, dtype)
            return answer if target is None else target.copy_(answer)

    def _from_host(self, func: Any, source: Tensor, dtype: torch.dtype, non_blocking: bool) -> None:
        if source.ndim == 0 and func is aten.copy_.default:
            return  # the value travels with the kernel's arguments
        if not non_blocking:
            self._wait("from host", func)
            return
        with unset_fake_temporarily():
            # Other dtypes and strides go through a new, pageable copy.
            direct = source.dtype == dtype and source.is_contiguous()
        if not direct or not self._is_pinned(source):
            self._wait("pageable", func)

    def _check_indices(self, func: Any, args: Any) -> None:
        for index in args[1]:
            if index is None:
                continue
            if index.dtype in (torch.bool, torch.uint8):
                self._wait("shape", func)
            if not isinstance(index, FakeTensor):
                self._wait("from host", func)

    def _pretended(self, tree: Any) -> Any:
        def convert(x: Any) -> Any:
            return self.fake.from_tensor(x) if isinstance(x, Tensor) and not isinstance(x, FakeTensor) else x

        return tree_map(convert, tree)

    def _answer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with unset_fake_temporarily():
            if dtype.is_floating_point:
                return torch.rand(shape, generator=self.values).to(dtype)
            return torch.randint(2, shape, generator=self.values).to(dtype)

    def _wait(self, kind: str, operation: Any) -> None:
        self.waits.append(Wait(kind, str(operation), _place()))


def to_gpu(module: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Move a module's parameters and buffers to the GPU. `Module.to` cannot exchange real tensors."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                moved = torch.empty(parameter.shape, dtype=dtype or parameter.dtype, device=CUDA)
                part._parameters[name] = nn.Parameter(moved, parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=CUDA)


def pinned(batch: PackedBatch) -> PackedBatch:
    """Return the batch in pinned memory, as the loader makes it for a GPU."""
    return PackedBatch(**{f.name: getattr(batch, f.name).pin_memory() for f in fields(batch)})


def _fused_rms_norm(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return RMSNorm as one operation, as it is on a GPU; a build without CUDA takes it apart.

    The kernel of a GPU keeps its input and the inverse norms for the backward pass too.
    """

    def rms_norm(
        x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if not isinstance(x, FakeTensor) or weight is None:
            return real(x, shape, weight, eps)
        return _RMSNorm.apply(x, weight, torch.finfo(x.dtype).eps if eps is None else eps)

    return rms_norm


def _on_gpu(x: Any) -> bool:
    if isinstance(x, torch.device):
        return x.type == "cuda"
    if isinstance(x, str):
        return x.startswith("cuda")
    return isinstance(x, FakeTensor)


def _place() -> str:
    """Return the innermost line of the project outside this directory's harness."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        of_the_harness = file.parent == HERE and not file.name.startswith("test_")
        # The environment may be in the checkout.
        if file.is_relative_to(ROOT) and not (of_the_harness or "site-packages" in file.parts):
            line = linecache.getline(str(file), frame.f_lineno).strip()
            return f"{file.relative_to(ROOT)}:{frame.f_lineno} {line}"
        frame = frame.f_back
    return "?"
