"""One side of scripts/bench/step: a process that runs a project's training step on request.

It runs in the side's environment. Requests and responses are lines of JSON on stdin and stdout.
"""

import ctypes
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
Json = dict[str, Any]
# The module that is trained, a step on the row of an index, and what the report says of the side.
Built = tuple[nn.Module, Callable[[int], Tensor], Json]


def main() -> None:
    spec = json.loads(sys.argv[1])
    # Only responses go to the pipe; what libraries print goes to the log.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(spec["threads"])
    try:
        side = Side(spec)
        answers.write(json.dumps(side.about) + "\n")
        for line in sys.stdin:
            request = json.loads(line)
            run = {"round": side.round, "memory": side.memory}[request["do"]]
            answers.write(json.dumps(run(request["row"])) + "\n")
    except Exception as error:
        traceback.print_exc()
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}) + "\n")
        sys.exit(1)


def build_eagle31(spec: Json, weights: dict[str, Tensor], rows: list[dict[str, Tensor]]) -> Built:
    """The head is trained or frozen according to `spec["head"]`."""
    from data.target.head import TargetHead
    from eagle31.model.drafter import Drafter
    from eagle31.model.frozen import FrozenParts
    from eagle31.training.batch import PackedBatch
    from eagle31.training.step import rollout_loss
    from scripts.bench.step_inputs import Shape

    shape = Shape(**spec["shape"])
    config = shape.config()
    trained = {name: tensor for name, tensor in weights.items() if not name.startswith(("target_", "draft_"))}
    head = trained.pop("lm_head.weight") if spec["head"] == "frozen" else None
    with torch.device("meta"):
        drafter = Drafter(config, with_head=head is None)
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
    options: Json = {"num_steps": shape.num_steps, "step_decay": shape.step_decay, "with_metrics": False}

    def step(index: int) -> Tensor:
        loss, sums = rollout_loss(drafter, frozen, batches[index], **options)
        scaled = loss / sums.num_rows[0]
        scaled.backward()
        return scaled.detach()

    return drafter, step, {"version": "this checkout"}


def linear(weight: Tensor) -> nn.Linear:
    """Return a frozen linear layer around `weight` [out, in]."""
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    module.load_state_dict({"weight": weight}, assign=True)
    return module.requires_grad_(False)


def build_peer(spec: Json, weights: dict[str, Tensor], rows: list[dict[str, Tensor]]) -> Built:
    from scripts.bench.peers.peer import Peer
    from scripts.bench.peers.specforge_peer import SpecForge
    from scripts.bench.peers.speculators_peer import Speculators
    from scripts.bench.peers.torchspec_peer import TorchSpec

    shape = spec["shape"]
    options: Json = {
        "ttt_steps": shape["num_steps"],
        "step_decay": shape["step_decay"],
        "device": torch.device(spec["device"]),
        "dtype": getattr(torch, spec["dtype"]),
    }
    sizes = spec["llama_config"], shape["draft_vocab_size"]
    peer: Peer
    if spec["side"] == "specforge":
        peer = SpecForge(*sizes, **options)
    elif spec["side"] == "torchspec":
        peer = TorchSpec(*sizes, loss="forward_kl", **options)
    else:
        ids = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        peer = Speculators(*sizes, loss="kl_div", config=ids, **options)
    peer.load(weights)
    inputs = [peer.inputs(row) for row in rows]

    def step(index: int) -> Tensor:
        loss = peer.loss(inputs[index])
        loss.backward()
        return loss.detach()

    return peer.model, step, {"version": peer.version, "ran": peer.ran["model"]}


class Side:
    """One side's step on the rows of a shape."""

    def __init__(self, spec: Json) -> None:
        self.device = torch.device(spec["device"])
        dtype: torch.dtype = getattr(torch, spec["dtype"])
        weights: dict[str, Tensor] = {}
        rows: list[dict[str, Tensor]] = [{} for _ in range(spec["num_rows"])]
        for name, tensor in load_file(spec["data"]).items():
            where, _, key = name.partition("/")
            group = weights if where == "weights" else rows[int(where)]
            group[key] = tensor.to(self.device, dtype if tensor.is_floating_point() else None)
        build = build_eagle31 if spec["side"] == "eagle31" else build_peer
        self.model, self.step, about = build(spec, weights, rows)
        self.about = about | {
            "num_trained": sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        }

    def round(self, row: int) -> Json:
        """Run forward and backward once, without an optimizer."""
        self.model.zero_grad(set_to_none=True)
        if self.device.type == "cuda":  # all sides share the device: each frees its cache and warms up again
            self.step(row)
            self.model.zero_grad(set_to_none=True)
        self.wait()
        wall, cpu = time.perf_counter(), time.process_time()
        loss = self.step(row)
        self.wait()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if self.device.type == "cuda":
            self.model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
        return {"wall_seconds": wall, "cpu_seconds": cpu, "loss": float(loss)}

    def memory(self, row: int) -> Json:
        """Return one step's peak memory, gradients included, above the weights, inputs and libraries.

        On a CPU this is the kernel's high-water mark of resident memory, reset just before the step after
        freed memory was returned; on a GPU it is torch's peak of allocated memory.
        """
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            baseline = torch.cuda.memory_allocated()
        else:
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            baseline = _status_bytes("VmRSS")
        self.step(row)
        self.wait()
        peak = torch.cuda.max_memory_allocated() if on_gpu else _status_bytes("VmHWM")
        return {"baseline_bytes": baseline, "step_bytes": peak - baseline}

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    main()
