"""The commands that start a run on given nodes."""

import shlex
from dataclasses import dataclass

from train.config.run import RunConfig
from train.config.vllm import Placement
from train.overrides import assigned, overrides_of
from train.planning.layout import Layout

_PORT, _RENDEZVOUS_PORT = 8000, 29500


@dataclass(frozen=True)
class Command:
    """A command and the nodes on which it is typed."""

    where: str
    line: str


def commands(config: RunConfig, layout: Layout) -> list[Command]:
    """Return the commands that start a run in this layout, by hand, and with Slurm for several nodes.

    TRAIN1 and TARGET1 stand for the names of the first nodes that train and that run the target; /shared is a
    directory that every node reaches.
    """
    cluster = layout.cluster
    given = overrides_of(config) | {key: assigned(value) for key, value in layout.overrides.items()}
    if layout.kind is Placement.shared and cluster.processes_per_node < cluster.gpus_per_node:
        given["vllm.placement"] = "shared"
    if layout.num_nodes > 1 and "output_dir" not in given:
        given["output_dir"] = f"/shared/{config.recipe_name}"
    arguments = [f"{key}={value}" for key, value in given.items()]
    found = []
    servers = []
    if layout.kind is Placement.apart and not config.vllm.servers:
        assert layout.placement is not None
        per_node = layout.placement.num_servers // cluster.capture_nodes
        nodes = [f"TARGET{index + 1}" for index in range(cluster.capture_nodes)]
        urls = [f"http://{node}:{_PORT + index}" for node in nodes for index in range(per_node)]
        servers = [f"vllm.servers=[{','.join(urls)}]"]
        several = ["--servers", str(per_node)] if per_node > 1 else []
        serve = ["scripts/serve_target", config.recipe_name, *arguments, "--host", "0.0.0.0", *several]
        where = " and ".join(nodes) if len(nodes) < 3 else f"{nodes[0]} to {nodes[-1]}"
        found.append(Command(where, shlex.join(serve)))
    script = ["train/main.py", f"recipe={config.recipe_name}", *arguments, *servers]
    processes = ["--nproc-per-node", str(cluster.processes_per_node)]
    if cluster.num_nodes == 1:
        where = "the node" if layout.num_nodes == 1 else "TRAIN1"
        found.append(Command(where, shlex.join(["torchrun", *processes, *script])))
    else:
        rendezvous = (
            f"--rdzv-backend c10d --rdzv-endpoint TRAIN1:{_RENDEZVOUS_PORT} --rdzv-id {config.recipe_name}"
        )
        line = ["torchrun", "--nnodes", str(cluster.num_nodes), *processes, *rendezvous.split(), *script]
        found.append(Command(f"each of TRAIN1 to TRAIN{cluster.num_nodes}", shlex.join(line)))
    if layout.num_nodes > 1 and not config.vllm.servers:
        found.append(Command("Slurm", shlex.join(_submit(config, layout, arguments))))
    return found


def _submit(config: RunConfig, layout: Layout, arguments: list[str]) -> list[str]:
    launcher = {
        "launcher": "slurm",
        "launcher.nodes": layout.num_nodes,
        "launcher.gpus_per_node": layout.cluster.gpus_per_node,
    }
    if layout.cluster.capture_nodes:
        assert layout.placement is not None
        per_node = layout.placement.num_servers // layout.cluster.capture_nodes
        launcher["launcher.capture_nodes"] = layout.cluster.capture_nodes
        if per_node > 1:
            launcher["launcher.servers_per_node"] = per_node
    settings = [f"{key}={value}" for key, value in launcher.items()]
    return ["scripts/submit", f"recipe={config.recipe_name}", *settings, *arguments]
