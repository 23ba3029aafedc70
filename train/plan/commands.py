"""The commands that start a run on given nodes."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import yaml
from omegaconf import OmegaConf

from train.config.compose import compose_config
from train.config.run import RunConfig
from train.config.vllm import Placement
from train.plan.placement import Cluster, ServerPlacement

_PORT, _RENDEZVOUS_PORT = 8000, 29500
_PLAIN = re.compile(r"[\w./:@%+-]+")
_LEFT_OUT = ("plan.", "recipe_name", "stages")


@dataclass(frozen=True)
class Command:
    """A command and the nodes on which it is typed."""

    where: str
    line: str


def commands(config: RunConfig, cluster: Cluster, placement: ServerPlacement | None) -> list[Command]:
    """Return the commands that start a run, by hand, and with Slurm for several nodes.

    TRAIN1 and TARGET1 stand for the names of the first nodes that train and that run the target; /shared is a
    directory that every node reaches.
    """
    given, recipe = overrides_of(config), f"recipe={config.recipe_name}"
    several = cluster.num_nodes + cluster.target_nodes > 1
    if several:
        given.setdefault("output_dir", f"/shared/{config.recipe_name}")
    arguments = [f"{key}={value}" for key, value in given.items()]
    found, servers, per_node = [], [], 1
    if cluster.target_nodes:
        assert placement is not None
        assert placement.kind is Placement.apart
        per_node = placement.num_servers // cluster.target_nodes
        nodes = [f"TARGET{index + 1}" for index in range(cluster.target_nodes)]
        urls = [f"http://{node}:{_PORT + index}" for node in nodes for index in range(per_node)]
        servers = [f"vllm.servers=[{','.join(urls)}]"]
        number = ["--servers", str(per_node)] if per_node > 1 else []
        serve = ["scripts/serve_target", config.recipe_name, *arguments, "--host", "0.0.0.0", *number]
        found.append(Command(" and ".join(nodes), shlex.join(serve)))
    torchrun = ["torchrun", "--nproc-per-node", str(cluster.processes_per_node)]
    where = "TRAIN1" if several else "the node"
    if cluster.num_nodes > 1:
        torchrun += ["--nnodes", str(cluster.num_nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint"]
        torchrun += [f"TRAIN1:{_RENDEZVOUS_PORT}", "--rdzv-id", config.recipe_name]
        where = f"each of TRAIN1 to TRAIN{cluster.num_nodes}"
    found.append(Command(where, shlex.join([*torchrun, "train/main.py", recipe, *arguments, *servers])))
    # A job has a process on each GPU.
    if several and not config.vllm.servers and cluster.processes_per_node == max(1, cluster.gpus_per_node):
        submit = ["scripts/submit", "--nodes", str(cluster.num_nodes + cluster.target_nodes)]
        if cluster.target_nodes:
            submit += ["--target-nodes", str(cluster.target_nodes)]
        if per_node > 1:
            submit += ["--servers-per-node", str(per_node)]
        submit += ["--gpus-per-node", str(cluster.gpus_per_node)]
        found.append(Command("Slurm", shlex.join([*submit, recipe, *arguments])))
    return found


def overrides_of(config: RunConfig) -> dict[str, str]:
    """Return the values in which a configuration differs from its recipe, as the command line takes them.

    Keys of the plan and `stages` are left out.
    """
    recipe = compose_config([f"recipe={config.recipe_name}"])
    theirs = dict(_leaves(OmegaConf.to_container(recipe, resolve=True, enum_to_str=True)))
    ours = dict(_leaves(OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)))
    return {
        key: assigned(value)
        for key, value in ours.items()
        if not key.startswith(_LEFT_OUT) and (key not in theirs or theirs[key] != value)
    }


def assigned(value: Any) -> str:
    """Return a value as Hydra reads it after `key=`."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(assigned, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{assigned(key)}:{assigned(one)}" for key, one in value.items()) + "}"
    if not isinstance(value, str):
        return str(value)
    if _PLAIN.fullmatch(value) and isinstance(yaml.safe_load(value), str):
        return value
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is not a mapping, by its dotted key; empty mappings say nothing."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key), value
