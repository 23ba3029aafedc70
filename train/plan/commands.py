"""The commands that start a run on given nodes."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from train.config.capture import CaptureSource
from train.config.run import RunConfig
from train.config.vllm import Placement
from train.plan.placement import RAY_ADDRESS, Cluster, ServerPlacement

_PORT, _RENDEZVOUS_PORT, _RAY_PORT = 8000, 29500, 6379
_LEFT_OUT = ("plan.", "recipe=", "stages=")  # of what the user gave for the plan


@dataclass(frozen=True)
class Command:
    """A command and the nodes on which it is typed."""

    where: str
    line: str


def commands(
    given: Sequence[str], config: RunConfig, cluster: Cluster, placement: ServerPlacement | None
) -> list[Command]:
    """Return the commands that start a run, by hand, and with Slurm for several nodes.

    TRAIN1 and TARGET1 stand for the names of the first nodes that train and that run the target; /shared is a
    directory that every node reaches.

    Args:
        given: the arguments of the command that prints the plan.
    """
    recipe = f"recipe={config.recipe_name}"
    arguments = [one for one in given if not one.lstrip("+").startswith(_LEFT_OUT)]
    several = cluster.num_nodes + cluster.target_nodes > 1
    if several and not any(one.lstrip("+").startswith("output_dir=") for one in arguments):
        arguments.append(f"output_dir=/shared/{config.recipe_name}")
    found: list[Command] = []
    servers: list[str] = []
    per_node = 1
    in_torchspec = config.capture.source is CaptureSource.torchspec
    ray = ""
    if cluster.target_nodes and in_torchspec:
        found, ray = _ray_commands(cluster)
    elif cluster.target_nodes:
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
    found.append(Command(where, ray + shlex.join([*torchrun, "train/main.py", recipe, *arguments, *servers])))
    # A job has a process on each GPU.
    by_job = several and not config.vllm.servers and not in_torchspec
    if by_job and cluster.processes_per_node == max(1, cluster.gpus_per_node):
        submit = ["scripts/submit", "--nodes", str(cluster.num_nodes + cluster.target_nodes)]
        if cluster.target_nodes:
            submit += ["--target-nodes", str(cluster.target_nodes)]
        if per_node > 1:
            submit += ["--servers-per-node", str(per_node)]
        submit += ["--gpus-per-node", str(cluster.gpus_per_node)]
        found.append(Command("Slurm", shlex.join([*submit, recipe, *arguments])))
    return found


def _ray_commands(cluster: Cluster) -> tuple[list[Command], str]:
    """Return the commands that start Ray on every node, and how a run's command has to begin."""
    head = f"TARGET1:{_RAY_PORT}"
    gpus = f"--num-gpus={cluster.gpus_per_node}"
    found = [Command("TARGET1", f"ray start --head --port={_RAY_PORT} {gpus}")]
    if cluster.target_nodes > 1:
        others = f"each of TARGET2 to TARGET{cluster.target_nodes}"
        found.append(Command(others, f"ray start --address={head} {gpus}"))
    # The GPUs that train are not Ray's.
    trainers = "TRAIN1" if cluster.num_nodes == 1 else f"each of TRAIN1 to TRAIN{cluster.num_nodes}"
    found.append(Command(trainers, f"ray start --address={head} --num-gpus=0"))
    return found, f"{RAY_ADDRESS}={head} "
