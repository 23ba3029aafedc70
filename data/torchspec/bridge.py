"""Runs in TorchSpec's environment: has its inference engines put the states of given tokens into Mooncake.

Its own controller is bound to its trainer (datasets from files, one queue for each rank) and drops what an
engine fails on. So this takes its place before the same engines: it starts them, hands them token ids, and
says under which key the states lie.

Lines of JSON: first an order from stdin, then a request each; answers to stdout. With `--probe`, prints what
this environment is. Nothing of eagle31 is imported, and this file is never imported by it.
"""

import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
import uuid
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

# What this depends on beyond names that an import would miss: formats, ids, what is stored where.
INTERFACE = (
    "config/inference_config.py",
    "config/mooncake_config.py",
    "config/train_config.py",
    "inference/engine/hf_engine.py",
    "inference/engine/hf_runner.py",
    "inference/engine/mooncake_hidden_states_connector.py",
    "inference/engine/sgl_engine.py",
    "inference/engine/vllm_engine.py",
    "inference/factory.py",
    "models/target/eagle3_target_model.py",
    "ray/placement_group.py",
    "transfer/mooncake/eagle_store.py",
)
PACKAGES = ("torchspec", "transformers", "torch", "ray", "omegaconf")
MOONCAKE = ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")
POLL_SECONDS = 0.01
STORE_FULL = "(code=-200)"
FULL_PAUSE_SECONDS = 0.5
REGISTRY = "eagle31-engines"


def probe() -> dict[str, Any]:
    """What is installed, without importing any of it."""
    versions = {name: version(name) for name in PACKAGES}
    versions["mooncake"] = next((found for name in MOONCAKE if (found := version(name))), None)
    spec = find_spec("torchspec")
    root = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
    whole = root is not None and all((root / name).is_file() for name in INTERFACE)
    return {
        "python": list(sys.version_info[:2]),
        "versions": versions,
        "torchspec": str(root) if root else None,
        "complete": whole,
        "revision": revision(root) if root and whole else None,
        "interface": interface(root) if root and whole else None,
    }


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def interface(root: Path) -> str:
    digest = hashlib.sha256()
    for name in INTERFACE:
        digest.update((root / name).read_bytes())
    return digest.hexdigest()


def revision(root: Path) -> str | None:
    command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def start_engines(order: dict[str, Any]) -> dict[str, Any]:
    """Starts TorchSpec's engines as its train_entry does, without its trainer."""
    import ray
    from torchspec.config.train_config import config_to_flat_args, load_config
    from torchspec.controller.setup import build_mooncake_config
    from torchspec.inference.factory import prepare_inference_engines
    from torchspec.ray.placement_group import _ensure_ray_initialized, create_placement_groups

    args = config_to_flat_args(load_config(cli_args=order["settings"]))
    check_rope(args, order["rope"])
    _ensure_ray_initialized()
    # It would wait for five minutes.
    wanted, found = args.inference_num_gpus or 0, int(ray.cluster_resources().get("GPU", 0))
    if found < max(wanted, 1):
        raise RuntimeError(
            f"Ray knows {found} GPUs and inference.inference_num_gpus is {wanted}: "
            "TorchSpec's engines need CUDA."
        )
    groups = create_placement_groups(args)
    engines, started = prepare_inference_engines(args, groups["inference"], build_mooncake_config(args))
    ray.get(started)
    return {
        "engines": engines,
        "prenorm": bool(args.last_hidden_states_prenorm),
        "batch_size": args.inference_batch_size,
        "max_batches": args.max_concurrent_batches,
    }


def check_rope(args: Any, expected: dict[str, Any]) -> None:
    """A checkpoint that transformers 5 saved keeps its RoPE where transformers 4 does not look for it."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(args.target_model_path, trust_remote_code=args.trust_remote_code)
    config = config.get_text_config()
    scaling = config.rope_scaling or {}
    found = {"rope_theta": config.rope_theta, "rope_type": "default", **scaling}
    for name in ("rope_theta", "rope_type", "factor"):
        if name in expected and expected[name] != found.get(name):
            raise RuntimeError(
                f"transformers there reads {name}={found.get(name)} of {args.target_model_path} where the "
                f"target has {expected[name]}: write rope_theta and rope_scaling into its config.json as "
                "transformers 4 does."
            )


def share(engines: dict[str, Any], namespace: str) -> Any:
    """Lets the bridges of other ranks find the engines; until the returned handle dies."""
    import ray

    class Registry:
        def __init__(self, content: dict[str, Any]) -> None:
            self.content = content

        def get(self) -> dict[str, Any]:
            return self.content

    actor = ray.remote(num_cpus=0)(Registry)
    return actor.options(name=REGISTRY, namespace=namespace).remote(engines)


def find_engines(namespace: str, timeout: float) -> dict[str, Any]:
    """The engines that rank 0's bridge has started, or starts meanwhile."""
    import ray

    deadline = time.monotonic() + timeout
    while True:
        try:
            if not ray.is_initialized():
                ray.init(address=os.environ.get("RAY_ADDRESS", "auto"))
            return ray.get(ray.get_actor(REGISTRY, namespace=namespace).get.remote())
        except (ConnectionError, ValueError, ray.exceptions.RayActorError):
            if time.monotonic() >= deadline:
                raise
            time.sleep(1.0)


class Dispatcher:
    """Hands requests to the engines and says what became of each."""

    def __init__(self, engines: dict[str, Any], answers: TextIO) -> None:
        self.engines = engines["engines"]
        self.batch_size = engines["batch_size"]
        self.limit = engines["max_batches"] * len(self.engines)
        self.answers = answers
        self.waiting: list[dict[str, Any]] = []
        self.running: dict[Any, list[dict[str, Any]]] = {}
        self.num_started = 0

    def serve(self, requests: "queue.Queue[dict[str, Any] | None]") -> None:
        """Until a None is among the requests."""
        while True:
            busy = bool(self.waiting or self.running)
            try:
                request = requests.get(block=not busy)
            except queue.Empty:
                self.start()
                self.collect()
                continue
            if request is None:
                return
            self.waiting.append(request)
            self.start()

    def start(self) -> None:
        import ray
        import torch

        while self.waiting and len(self.running) < self.limit:
            # A request that its batch failed with goes alone, to tell which one it was.
            size = 1 if self.waiting[0].get("alone") else self.batch_size
            batch, self.waiting = self.waiting[:size], self.waiting[size:]
            engine = self.engines[self.num_started % len(self.engines)]
            self.num_started += 1
            result = engine.generate.remote(
                # Keys of Mooncake come from it: a request that is repeated must get new ones.
                data_id=[f"{request['key']}-{uuid.uuid4().hex[:8]}" for request in batch],
                input_ids_ref=ray.put([torch.tensor(request["input_ids"]) for request in batch]),
                packed_loss_mask_list=[f"0,{len(request['input_ids'])}" for request in batch],
                return_last_hidden_states=True,
                return_logits=False,
            )
            self.running[result] = batch

    def collect(self) -> None:
        import ray

        ready, _ = ray.wait(list(self.running), timeout=POLL_SECONDS)
        for result in ready:
            batch = self.running.pop(result)
            try:
                outputs = ray.get(result)
            except ray.exceptions.RayTaskError as error:
                self.failed(batch, str(error.cause))
                continue
            if len(outputs) != len(batch):
                self.failed(batch, f"the engine answered {len(outputs)} of {len(batch)} requests")
                continue
            for request, output in zip(batch, outputs, strict=True):
                self.answer(key=request["key"], stored=output["mooncake_key"])

    def failed(self, batch: list[dict[str, Any]], reason: str) -> None:
        if STORE_FULL in reason:
            time.sleep(FULL_PAUSE_SECONDS)
            self.waiting += batch
        elif len(batch) > 1:
            self.waiting = [{**request, "alone": True} for request in batch] + self.waiting
        else:
            self.answer(key=batch[0]["key"], refused=reason)

    def answer(self, **content: Any) -> None:
        print(json.dumps(content), file=self.answers, flush=True)


def read_lines(requests: "queue.Queue[dict[str, Any] | None]") -> None:
    for line in sys.stdin:
        requests.put(json.loads(line))
    requests.put(None)


def main() -> None:
    # This file's directory, where modules have the names of packages: torchspec, vllm.
    del sys.path[0]
    # Ray and TorchSpec print.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if sys.argv[1:] == ["--probe"]:
        print(json.dumps(probe()), file=answers, flush=True)
        return
    order = json.loads(sys.stdin.readline())
    requests: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=read_lines, args=(requests,), daemon=True).start()
    try:
        if order["leads"]:
            engines = start_engines(order)
            registry = share(engines, order["namespace"])  # noqa: F841
        else:
            engines = find_engines(order["namespace"], order["start_seconds"])
        dispatcher = Dispatcher(engines, answers)
        dispatcher.answer(ready=True, prenorm=engines["prenorm"], num_engines=len(engines["engines"]))
        dispatcher.serve(requests)
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"fatal": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
