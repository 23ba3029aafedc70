"""Records what a training step does on a GPU: each operation's part of the step, FLOPs and bytes.

Parts follow from the stack at the operation. An operation of the backward pass has the part of the forward
operation whose node of the graph is run, unless a line of the project on the stack says more. Nodes are found
by the sequence numbers that autograd gives them, so the backward pass has to be that of
`scripts.bench.pretended_gpu.backward`, on a real GPU too.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from data.target.head import TargetHead
from eagle31.cost.flops import sum_of_depths
from eagle31.model.attention import AttentionModule
from eagle31.model.layer import MLP
from eagle31.model.rope import Rotary
from scripts.bench.pretended_gpu.backward import backward

FUSION, PROJECTIONS, ATTENTION = "captured rows, fusion", "projections", "attention"
MERGE, MLPS, NORMS = "rollout merge", "MLP", "norms, RoPE"
HEAD, TEACHER, OTHER, OPTIMIZER = "head, loss", "teacher", "other", "optimizer"
PARTS = (FUSION, PROJECTIONS, ATTENTION, MERGE, MLPS, NORMS, HEAD, TEACHER, OTHER, OPTIMIZER)

ROOT = Path(__file__).resolve().parents[2]
# The innermost of these on the stack decides: a module, or a file with a function's name or "" for any.
_MODULES = ((MLP, MLPS), (TargetHead, TEACHER), (Rotary, NORMS), (nn.RMSNorm, NORMS))
_PLACES = {
    ("eagle31/kernels/packed_attention.py", ""): ATTENTION,
    ("eagle31/kernels/tiled_attention.py", ""): ATTENTION,
    ("eagle31/kernels/merged_attention.py", ""): MERGE,
    ("eagle31/kernels/packed_steps.py", ""): MERGE,
    ("eagle31/kernels/rollout_terms.py", ""): MERGE,
    ("eagle31/kernels/split_linear.py", ""): PROJECTIONS,
    ("eagle31/kernels/rotation.py", ""): NORMS,
    ("eagle31/training/rollout.py", "attend"): MERGE,
    ("eagle31/training/rollout.py", "prefill"): FUSION,
    ("eagle31/model/drafter.py", "fuse"): FUSION,
    ("eagle31/training/teacher.py", ""): TEACHER,
    ("eagle31/training/fused_loss.py", ""): HEAD,
}

aten = torch.ops.aten
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
_ALLOCATIONS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
# Operations that overwrite their first argument without reading it; that read as many of its elements as the
# result has; that write as many as the values have.
_OVERWRITES = {aten.copy_, aten.fill_, aten.zero_}
_GATHERS = {aten.embedding, aten.gather, aten.index, aten.index_select}
_SCATTERS = {aten.index_add_, aten.index_copy_, aten.index_put_, aten.scatter_, aten.scatter_add_}


@dataclass(frozen=True)
class Operation:
    """One operation on the device, which counts as one launch."""

    name: str
    part: str
    flops: int  # of matrix products and attention
    num_bytes: int  # inputs read and outputs written
    host_bytes: int = 0  # copied between the host and the device


class Recorder(TorchDispatchMode):
    """Record the operations of what is inside. Enter it inside of the pretended GPU.

    Args:
        profiled: instead name each operation's part to the profiler that is running.
    """

    def __init__(self, profiled: bool = False) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.part: str | None = None  # of all operations; None: the stack's
        self._profiled = profiled
        self._part_of_node: dict[int, str] = {}
        # The values of int32 tensors that were copied to the device, by their storage, which is kept.
        self._host_values: dict[int, tuple[Any, list[int]]] = {}
        self._exits = ExitStack()

    def __enter__(self) -> "Recorder":
        for kind in (JITFunction, InterpretedFunction):
            self._exits.enter_context(mock.patch.object(kind, "run", self._launcher(kind.run)))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._exits.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        part = self._current_part(sys._getframe(1))
        if self._profiled:
            with record_function(part):
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        arguments = dict(zip((x.name for x in func._schema.arguments), args, strict=False)) | kwargs
        if _tensors(arguments) or _tensors(result):
            self._record(func, part, arguments, result)
        return result

    def _launcher(self, original: Any) -> Any:
        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            part = self._current_part(sys._getframe(1))
            with record_function(part) if self._profiled else nullcontext():
                result = original(kernel, *args, **kwargs)
            arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
            accesses = _accesses(kernel.fn)
            tensors = [(x, name) for name, x in arguments.items() if isinstance(x, Tensor)]
            num_bytes = sum(_bytes(x) * max(1, accesses.get(name, 0)) for x, name in tensors)
            self.operations.append(Operation(kernel.fn.__name__, part, 0, num_bytes))
            return result

        return run

    def _current_part(self, frame: FrameType | None) -> str:
        if self.part is not None:
            return self.part
        part = self._part_on_stack(frame)
        # The newest node is this operation's, if it has one.
        self._part_of_node.setdefault(torch.autograd._get_sequence_nr() - 1, part)
        return part

    def _part_on_stack(self, frame: FrameType | None) -> str:
        in_linear = False
        while frame is not None:
            code = frame.f_code
            if code is backward.__code__:
                node = frame.f_locals.get("node")  # None before the first one
                return OTHER if node is None else self._part_of_node.get(node._sequence_nr(), OTHER)
            owner = frame.f_locals["self"] if code.co_varnames[:1] == ("self",) else None
            in_linear = in_linear or isinstance(owner, nn.Linear)
            for kind, part in _MODULES:
                if isinstance(owner, kind):
                    return part
            if isinstance(owner, AttentionModule):
                return PROJECTIONS if in_linear else NORMS
            path = code.co_filename.removeprefix(f"{ROOT}/")
            found = _PLACES.get((path, code.co_name)) or _PLACES.get((path, ""))
            if found is not None:
                return found
            frame = frame.f_back
        return PROJECTIONS if in_linear else OTHER

    def _record(self, func: Any, part: str, arguments: dict[str, Any], result: Any) -> None:
        packet, schema = func.overloadpacket, func._schema
        inputs, outputs = _tensors(arguments), _tensors(result)
        written = [
            x
            for one in schema.arguments
            if one.alias_info is not None and one.alias_info.is_write
            for x in _tensors(arguments.get(one.name))
        ]
        shared = {x.untyped_storage()._cdata for x in inputs}
        is_view = not written and all(x.untyped_storage()._cdata in shared for x in outputs)
        if packet in _ALLOCATIONS or (outputs and is_view):
            return
        host = [x for x in tree_leaves((arguments, result)) if isinstance(x, Tensor) and not _on_gpu(x)]
        if packet is aten._to_copy and host and outputs and outputs[0].dtype is torch.int32:
            storage = outputs[0].untyped_storage()
            self._host_values[storage._cdata] = storage, host[0].tolist()
        changed = {x.untyped_storage()._cdata for x in written}
        outputs = [*written, *(x for x in outputs if x.untyped_storage()._cdata not in changed)]
        unread = {id(x) for x in written} if packet in _OVERWRITES or "out" in arguments else set()
        read = [_bytes(x) for x in inputs if id(x) not in unread]
        wrote = [_bytes(x) for x in outputs]
        if packet in _GATHERS:
            read[0] = min(read[0], sum(wrote))
        if packet in _SCATTERS:
            wrote, read = [max(read[1:])], read[1:]
        copied = sum(map(_bytes, host)) if packet in (aten._to_copy, aten.copy_) else 0
        self.operations.append(
            Operation(str(func), part, self._flops(packet, arguments, result), sum(read + wrote), copied)
        )

    def _flops(self, packet: Any, arguments: dict[str, Any], result: Any) -> int:
        if packet in (aten._flash_attention_forward, aten._flash_attention_backward):
            return self._attention_flops(arguments, is_backward=packet is aten._flash_attention_backward)
        name = packet.__name__.rstrip("_")  # of an operation in place
        if name not in _PRODUCTS:
            return 0
        given = {key: x for key, x in arguments.items() if key not in ("out", "out_dtype", "alpha", "beta")}
        return int(flop_registry[getattr(aten, name)](*given.values(), out_val=result))

    def _attention_flops(self, arguments: dict[str, Any], is_backward: bool) -> int:
        """Return the FLOPs of the visible pairs: two products forward, and five backward."""
        starts = [self._lengths(arguments[name]) for name in ("cum_seq_q", "cum_seq_k")]
        assert arguments["is_causal"]
        left = arguments.get("window_size_left")
        window = None if left is None or left < 0 else left + 1
        pairs = sum(
            sum_of_depths(num_keys - num_queries + 1, num_queries, window)
            for num_queries, num_keys in zip(*starts, strict=True)
        )
        num_heads, width = arguments["query"].shape[-2:]
        value_width = arguments["value"].shape[-1]
        widths = 3 * width + 2 * value_width if is_backward else width + value_width
        return int(2 * pairs * num_heads * widths)

    def _lengths(self, offsets: Tensor) -> list[int]:
        """Return the lengths of sequences from their cumulative sums on the device."""
        _, values = self._host_values[offsets.untyped_storage()._cdata]
        start = offsets.storage_offset()
        found = values[start : start + len(offsets)]
        return [stop - begin for begin, stop in pairwise(found)]


def _on_gpu(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == "cuda"


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if _on_gpu(x)]


def _bytes(x: Tensor) -> int:
    """Return the bytes of the elements in memory; an expanded tensor has fewer than its shape says."""
    dimensions = zip(x.shape, x.stride(), strict=True)
    return x.itemsize * prod(size for size, stride in dimensions if stride or not size)


@cache
def _accesses(function: Any) -> dict[str, int]:
    """Return for arguments of a Triton kernel 1 if it loads or stores through them, and 2 for both."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    # The arguments that a variable is computed from, results of calls left out.
    origins = {name: {name} for name in inspect.signature(function).parameters}

    def of(node: ast.AST) -> set[str]:
        if isinstance(node, ast.Name):
            return origins.get(node.id, set())
        children: Iterator[ast.AST] = iter(()) if isinstance(node, ast.Call) else ast.iter_child_nodes(node)
        return set().union(*map(of, children))

    for node in [*ast.walk(tree)] * 2:  # a variable may be assigned in a loop after its use
        if isinstance(node, ast.Assign | ast.AugAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    origins.setdefault(target.id, set()).update(of(node.value))
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            name = node.func.attr
            for kind in ("load", "store") if "atomic" in name else (name,):
                if kind in ("load", "store"):
                    for argument in of(node.args[0]):
                        found.setdefault(argument, set()).add(kind)
    return {name: len(kinds) for name, kinds in found.items()}
