"""A GPU that is not there: tensors on "cuda" have shapes, dtypes and strides, and no values.

Tensors on the CPU are real and their operations are computed. Tensors on "cuda" are those of PyTorch's
`FakeTensorMode`, which checks the arguments of every operation as the device does. Every call for which the
host would wait for a GPU is recorded. What is copied from the device consists of ones.
"""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
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
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from eagle31.training.batch import PackedBatch
from tests.pretended_gpu.device_guard import cuda_device_guard

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
_HARNESS = {HERE / name for name in ("device.py", "backward.py", "device_guard.py")}
CUDA = torch.device("cuda", 0)
H100 = SimpleNamespace(
    major=9, minor=0, name="NVIDIA H100", total_memory=80 * 2**30, multi_processor_count=132
)
aten = torch.ops.aten

# Operations that read whole tensors on the host, or whose result has a shape that depends on values.
_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class PretendedGpu(TorchDispatchMode):
    """Run what is inside on a GPU that is not there."""

    def __init__(self) -> None:
        super().__init__()
        # Calls for which the host waits: their kind ("read", "shape", "to host", "from host", "synchronize",
        # "pageable": a copy that is not async), the operation, and the line of the project.
        self.waits: list[tuple[str, str, str]] = []
        self.operations: list[Any] = []  # of the device, in order; Triton's kernels are functions
        self.fake = FakeTensorMode()
        self._pinned: dict[int, torch.UntypedStorage] = {}
        self._exits = ExitStack()

    @contextmanager
    def no_waiting(self, allowed: int = 0) -> Iterator[None]:
        """Fail if the host waits for the device more than `allowed` times, or copies pageable memory."""
        before = len(self.waits)
        yield
        found = self.waits[before:]
        assert len(found) <= allowed and "pageable" not in {wait[0] for wait in found}, found  # noqa: PT018

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

        def record_stream(tensor: Tensor, _: Any) -> None:
            assert isinstance(tensor, FakeTensor), "not a tensor of the GPU"
            self.operations.append(aten.record_stream.default)

        def launch(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
            self.operations.append(kernel.fn)

        stream, event = mock.MagicMock(), mock.MagicMock()
        stream.synchronize.side_effect = event.return_value.synchronize.side_effect = synchronize
        event.return_value.elapsed_time.return_value = 1.0
        replaced = {
            "get_device_properties": lambda *_: H100,
            "get_device_capability": lambda *_: (H100.major, H100.minor),
            "get_device_name": lambda *_: H100.name,
            "current_device": lambda: 0,
            "set_device": lambda *_: None,
            "_exchange_device": lambda *_: 0,
            "_maybe_exchange_device": lambda *_: 0,
            "synchronize": synchronize,
            "current_stream": lambda *_: stream,
            "Stream": lambda *_, **__: stream,
            "stream": lambda *_: nullcontext(),
            "Event": event,
        }
        return [
            mock.patch.object(FakeTensor, "tolist", lambda tensor: self._read(tensor)),
            mock.patch.object(torch.Tensor, "record_stream", record_stream),
            mock.patch.object(torch.backends.cuda, "is_flash_attention_available", return_value=True),
            *(mock.patch.object(kind, "run", launch) for kind in (JITFunction, InterpretedFunction)),
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
            with unset_fake_temporarily():
                return func is aten.equal.default or torch.ones((), dtype=args[0].dtype).item()
        if func in _INDEXED:
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    self._wait("shape", func)
                if index is not None and not isinstance(index, FakeTensor):
                    self._wait("from host", func)
        try:
            return func(*self._pretended(args), **self._pretended(kwargs))
        except DynamicOutputShapeException:
            self._wait("shape", func)
            raise

    def _read(self, tensor: Tensor) -> Any:
        """Return a tensor's values as lists; the real method reads all of them in one copy."""
        self._wait("read", "Tensor.tolist")
        with unset_fake_temporarily():
            return _ones(tensor.shape, tensor.dtype).tolist()

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
            # A number that is copied into a tensor travels with the kernel's arguments.
            if not isinstance(source, FakeTensor) and source.numel() and (source.ndim or target is None):
                self._from_host(func, source, dtype, non_blocking)
            return func(*self._pretended(args), **self._pretended(kwargs))
        # Without a target, a non-blocking copy is to new pinned memory.
        waits = not non_blocking or (target is not None and not self._is_pinned(target))
        if waits and source.numel():
            self._wait("to host", func)
        with unset_fake_temporarily():
            answer = _ones(source.shape, dtype)
            return answer if target is None else target.copy_(answer)

    def _from_host(self, func: Any, source: Tensor, dtype: torch.dtype, non_blocking: bool) -> None:
        with unset_fake_temporarily():
            # Other dtypes and strides go through a new, pageable copy.
            direct = source.dtype == dtype and source.is_contiguous() and self._is_pinned(source)
        if not (non_blocking and direct):
            self._wait("pageable" if non_blocking else "from host", func)

    def _pretended(self, tree: Any) -> Any:
        def convert(x: Any) -> Any:
            return self.fake.from_tensor(x) if isinstance(x, Tensor) and not isinstance(x, FakeTensor) else x

        return tree_map(convert, tree)

    def _wait(self, kind: str, operation: Any) -> None:
        """Record a wait with the innermost line of the project outside of this harness."""
        for frame in reversed(traceback.extract_stack()):
            file = Path(frame.filename)
            # The environment may be in the checkout.
            is_ours = file.is_relative_to(ROOT) and "site-packages" not in file.parts
            if is_ours and file not in _HARNESS:
                self.waits.append((kind, str(operation), f"{file.relative_to(ROOT)}:{frame.lineno}"))
                return


def to_gpu(module: nn.Module) -> None:
    """Move a module's parameters and buffers to the GPU. `Module.to` cannot exchange real tensors."""
    for part in module.modules():
        owned: list[dict[str, Any]] = [part._parameters, part._buffers]
        for tensors in owned:
            for name, tensor in tensors.items():
                if tensor is not None:
                    moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    tensors[name] = nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved


def pinned(batch: PackedBatch) -> PackedBatch:
    """Return the batch in pinned memory, as the loader makes it for a GPU."""
    return PackedBatch(**{f.name: getattr(batch, f.name).pin_memory() for f in fields(batch)})


def _ones(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    with unset_fake_temporarily():
        return torch.ones(shape, dtype=dtype)


def _on_gpu(x: Any) -> bool:
    if isinstance(x, torch.device):
        return x.type == "cuda"
    return x.startswith("cuda") if isinstance(x, str) else isinstance(x, FakeTensor)
