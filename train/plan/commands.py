"""The commands that start a run on given nodes."""

import shlex
from collections.abc import Sequence

from train.plan.placement import Cluster, ServerPlacement
from train.plan.where import Command, WhereTargetRuns, training_nodes

_RENDEZVOUS_PORT = 29500
_LEFT_OUT = ("plan.", "recipe=", "stages=")  # of what the user gave for the plan


def commands(
    given: Sequence[str], target: WhereTargetRuns, cluster: Cluster, servers: ServerPlacement | None
) -> list[Command]:
    """Return the commands that start a run, by hand, and with Slurm for several nodes.

    TRAIN1 and TARGET1 stand for the names of the first nodes that train and that run the target; /shared is a
    directory that every node reaches.

    Args:
        given: the arguments of the command that prints the plan.
    """
    name, num_nodes = target.config.recipe_name, cluster.num_nodes + cluster.target_nodes
    arguments = [one for one in given if not one.lstrip("+").startswith(_LEFT_OUT)]
    if num_nodes > 1 and not any(one.lstrip("+").startswith("output_dir=") for one in arguments):
        arguments.append(f"output_dir=/shared/{name}")
    start = target.start(cluster, servers, arguments)
    torchrun = ["torchrun", "--nproc-per-node", str(cluster.processes_per_node)]
    if cluster.num_nodes > 1:
        torchrun += ["--nnodes", str(cluster.num_nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint"]
        torchrun += [f"TRAIN1:{_RENDEZVOUS_PORT}", "--rdzv-id", name]
    line = shlex.join([*torchrun, "train/main.py", f"recipe={name}", *arguments, *start.arguments])
    where = training_nodes(cluster) if num_nodes > 1 else "the node"
    found = [*start.commands, Command(where, start.environment + line)]
    # A job has a process on each GPU.
    if num_nodes > 1 and target.in_slurm and cluster.processes_per_node == max(1, cluster.gpus_per_node):
        submit = ["scripts/submit", "--nodes", str(num_nodes), *start.submit]
        submit += ["--gpus-per-node", str(cluster.gpus_per_node)]
        found.append(Command("Slurm", shlex.join([*submit, f"recipe={name}", *arguments])))
    return found
