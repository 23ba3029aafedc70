"""One side of scripts/bench/step, in the side's environment: python -I step_side.py SPEC OUTPUT

It runs forward and backward, without an optimizer, on each row, and writes times and memory to OUTPUT.
"""

import ctypes
import gc
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

_FREE = 0.9  # of the free memory: what a side may take on a CPU
Json = dict[str, Any]
Tensors = dict[str, Tensor]
# The module that is trained, its loss on the row of an index, and its version.
Built = tuple[nn.Module, Callable[[int], Tensor], str]


def main() -> None:
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    device, dtype = torch.device(spec["device"]), getattr(torch, spec["dtype"])
    if device.type == "cpu":
        free = int(_FREE * _bytes_of("MemAvailable", "/proc/meminfo"))
        resource.setrlimit(resource.RLIMIT_DATA, (free, free))
    weights: Tensors = {}
    rows: dict[str, Tensors] = {}
    for name, tensor in load_file(spec["inputs"]).items():
        where, _, key = name.partition("/")
        group = weights if where == "weights" else rows.setdefault(where, {})
        group[key] = tensor.to(device, dtype if tensor.is_floating_point() else None)
    build = build_eagle31 if spec["side"].startswith("eagle31") else build_peer
    model, loss_of, version = build(spec, weights, [rows[str(index)] for index in range(len(rows))])
    run_step(model, loss_of, 0)  # warms up
    measured: Json = {"version": version, "step_bytes": step_bytes(model, loss_of)}
    measured["num_trained"] = sum(one.numel() for one in model.parameters() if one.requires_grad)
    timed = [run_step(model, loss_of, index) for index in range(len(rows))]
    for name, values in zip(("wall_seconds", "cpu_seconds", "loss"), zip(*timed, strict=True), strict=True):
        measured[name] = values
    Path(sys.argv[2]).write_text(json.dumps(measured))


def build_eagle31(spec: Json, weights: Tensors, rows: list[Tensors]) -> Built:
    """The head is trained or frozen according to `spec["head"]`."""
    from data.target.head import TargetHead
    from eagle31.model.frozen import FrozenParts
    from eagle31.model.kinds import new_drafter
    from eagle31.training.batch import PackedBatch
    from eagle31.training.step import rollout_loss
    from scripts.bench.peers import drafter_weights
    from scripts.bench.step_inputs import Shape

    config = Shape(**spec["shape"]).config()
    trained = drafter_weights(weights)
    head = trained.pop("lm_head.weight") if spec["head"] == "frozen" else None
    with torch.device("meta"):
        drafter = new_drafter(config, with_head=head is None)
        norm = nn.RMSNorm(config.target_hidden_size, eps=config.rms_norm_eps)
    drafter.load_state_dict(trained, assign=True)
    drafter.requires_grad_(True)
    norm.load_state_dict({"weight": weights["target_norm"]}, assign=True)
    frozen = FrozenParts(
        embed_tokens=weights["target_embed"],
        target_head=TargetHead(norm, linear(weights["target_head"])),
        draft_target_ids=weights["draft_target_ids"],
        lm_head=None if head is None else linear(head),
    )
    batches = [PackedBatch(**row) for row in rows]
    options: Json = {"num_steps": spec["ttt_steps"], "step_decay": spec["step_decay"], "with_metrics": False}

    def loss_of(index: int) -> Tensor:
        loss, sums = rollout_loss(drafter, frozen, batches[index], **options)
        return loss / sums.num_rows[0]

    return drafter, loss_of, ""


def linear(weight: Tensor) -> nn.Linear:
    """Return a frozen linear layer around `weight` [out, in]."""
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    module.load_state_dict({"weight": weight}, assign=True)
    return module.requires_grad_(False)


def build_peer(spec: Json, weights: Tensors, rows: list[Tensors]) -> Built:
    from scripts.bench.peers import PEERS

    peer = PEERS[spec["side"]](spec, weights, torch.device(spec["device"]), getattr(torch, spec["dtype"]))
    inputs = [peer.inputs(row) for row in rows]
    return peer.model, lambda index: peer.loss(inputs[index]), peer.version


def run_step(model: nn.Module, loss_of: Callable[[int], Tensor], index: int) -> tuple[float, float, float]:
    """Return the step's time, its time on all cores, and the loss."""
    model.zero_grad(set_to_none=True)
    wait()
    wall, cpu = time.perf_counter(), time.process_time()
    loss = loss_of(index)
    loss.backward()
    wait()
    return time.perf_counter() - wall, time.process_time() - cpu, float(loss.detach())


def step_bytes(model: nn.Module, loss_of: Callable[[int], Tensor]) -> int:
    """Return the peak memory of a step, gradients included, above the weights, inputs and libraries.

    On a CPU this is the kernel's high-water mark of resident memory, reset just before the step after freed
    memory was returned; on a GPU it is torch's peak of allocated memory.
    """
    model.zero_grad(set_to_none=True)
    gc.collect()
    on_gpu = next(model.parameters()).device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _bytes_of("VmRSS")
    run_step(model, loss_of, 0)
    return (torch.cuda.max_memory_allocated() if on_gpu else _bytes_of("VmHWM")) - before


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _bytes_of(key: str, file: str = "/proc/self/status") -> int:
    lines = Path(file).read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    main()
