"""Run TorchSpec's inference engines in its environment, to put the states of given tokens into Mooncake.

TorchSpec's own controller is bound to its trainer (datasets from files, one queue per rank) and drops the
prompts that an engine fails on. This program replaces it: it starts the same engines, hands them token ids,
and answers with the key under which the states are stored.

JSON lines drive it (`data/processes/child.py`). With `--probe` it prints what the environment holds. It
imports nothing of eagle31, and nothing imports it.
"""

import hashlib
import json
import os
import queue
import subprocess
import sys
import time
import traceback
import uuid
from importlib import metadata
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

CHANNEL = Path(__file__).parents[1] / "processes" / "child.py"
# The files whose formats, ids and storage keys this depends on, beyond the names that it imports.
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
    """Return what is installed, without importing any of it."""
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


def start_engines(settings: dict[str, Any]) -> dict[str, Any]:
    """Start TorchSpec's engines as its train_entry does, without its trainer."""
    import ray
    from torchspec.config.train_config import config_to_flat_args, load_config
    from torchspec.controller.setup import build_mooncake_config
    from torchspec.inference.factory import prepare_inference_engines
    from torchspec.ray.placement_group import _ensure_ray_initialized, create_placement_groups

    args = config_to_flat_args(load_config(cli_args=settings["torchspec"]))
    check_rope(args, settings["rope"])
    _ensure_ray_initialized()
    # TorchSpec would wait for five minutes.
    required, found = args.inference_num_gpus or 0, int(ray.cluster_resources().get("GPU", 0))
    if found < max(required, 1):
        raise RuntimeError(
            f"Ray knows {found} GPUs and inference.inference_num_gpus is {required}: "
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
    """Compare the RoPE settings that transformers 4 reads with the target's.

    It does not find those of a checkpoint that transformers 5 saved.

    Raises:
        RuntimeError: they differ.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(args.target_model_path, trust_remote_code=args.trust_remote_code)
    config = config.get_text_config()
    scaling = config.rope_scaling or {}
    found = {"rope_theta": config.rope_theta, "rope_type": "default", **scaling}
    for name in ("rope_theta", "rope_type", "factor"):
        if name in expected and expected[name] != found.get(name):
            raise RuntimeError(
                f"transformers in TorchSpec's environment reads {name}={found.get(name)} of "
                f"{args.target_model_path} where the target has {expected[name]}: write rope_theta and "
                "rope_scaling into its config.json as transformers 4 does."
            )


def register_engines(engines: dict[str, Any], namespace: str) -> Any:
    """Let the bridges of other ranks find the engines, until the returned handle dies."""
    import ray

    class Registry:
        def __init__(self, content: dict[str, Any]) -> None:
            self.content = content

        def get(self) -> dict[str, Any]:
            return self.content

    actor = ray.remote(num_cpus=0)(Registry)
    return actor.options(name=REGISTRY, namespace=namespace).remote(engines)


def find_engines(namespace: str, timeout: float) -> dict[str, Any]:
    """Return the engines of rank 0's bridge; wait for them up to `timeout` seconds."""
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
    """Hands requests to the engines and answers each of them."""

    def __init__(self, engines: dict[str, Any], channel: Any) -> None:
        self.engines = engines["engines"]
        self.batch_size = engines["batch_size"]
        self.limit = engines["max_batches"] * len(self.engines)
        self.channel = channel
        self.waiting: list[dict[str, Any]] = []
        self.running: dict[Any, list[dict[str, Any]]] = {}
        self.num_started = 0

    def serve(self) -> None:
        """Answer requests until the parent ends or wants no more."""
        while True:
            busy = bool(self.waiting or self.running)
            try:
                request = self.channel.requests.get(block=not busy)
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
            # The requests of a batch that failed go one at a time, to find the one that fails.
            size = 1 if self.waiting[0].get("alone") else self.batch_size
            batch, self.waiting = self.waiting[:size], self.waiting[size:]
            engine = self.engines[self.num_started % len(self.engines)]
            self.num_started += 1
            result = engine.generate.remote(
                # Mooncake's keys are made from it: a request that is repeated must get new ones.
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
        self.channel.answer(content)


def open_channel() -> Any:
    """Open the connection to the parent; its module is loaded by location, as `data` is not on the path."""
    spec = spec_from_file_location("eagle31_channel", CHANNEL)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Channel()


def main() -> None:
    if sys.argv[1:] == ["--probe"]:
        print(json.dumps(probe()), flush=True)
        return
    channel = open_channel()
    settings = channel.settings
    try:
        if settings["leads"]:
            engines = start_engines(settings)
            registry = register_engines(engines, settings["namespace"])  # noqa: F841
        else:
            engines = find_engines(settings["namespace"], settings["start_seconds"])
        channel.ready(prenorm=engines["prenorm"], num_engines=len(engines["engines"]))
        Dispatcher(engines, channel).serve()
    except Exception as error:
        traceback.print_exc()
        channel.fail(f"{type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
