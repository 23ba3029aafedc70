"""The commands that start a run on given nodes."""

import shlex
from collections.abc import Sequence

from train.config.capture import CaptureSource
from train.config.run import RunConfig
from train.plan.cluster import Cluster
from train.plan.placement import RAY_ADDRESS, TargetPlacement

_SERVER_PORT, _RAY_PORT, _RENDEZVOUS_PORT = 8000, 6379, 29500
_LEFT_OUT = ("plan.", "recipe=", "stages=")  # of what the user gave for the plan


Command = tuple[str, str]  # the nodes on which it is typed, and its line


def commands(
    given: Sequence[str], config: RunConfig, cluster: Cluster, target: TargetPlacement
) -> list[Command]:
    """Return the commands that start a run, by hand, and with Slurm for several nodes.

    TRAIN1 and TARGET1 stand for the names of the first nodes that train and that run the target; /shared is a
    directory that every node reaches.

    Args:
        given: the arguments of the command that prints the plan.
    """
    name, num_nodes = config.recipe_name, cluster.all_nodes
    in_ray = config.capture.source is CaptureSource.torchspec
    arguments = [one for one in given if not one.lstrip("+").startswith(_LEFT_OUT)]
    if num_nodes > 1 and not any(one.lstrip("+").startswith("output_dir=") for one in arguments):
        arguments.append(f"output_dir=/shared/{name}")
    torchrun = ["torchrun", "--nproc-per-node", str(cluster.processes_per_node)]
    if cluster.num_nodes > 1:
        torchrun += ["--nnodes", str(cluster.num_nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint"]
        torchrun += [f"TRAIN1:{_RENDEZVOUS_PORT}", "--rdzv-id", name]
    torchrun += ["train/main.py", f"recipe={name}", *arguments]
    submit = ["scripts/submit", "--nodes", str(num_nodes)]
    found: list[Command] = []
    environment = ""
    trains = "TRAIN1" if cluster.num_nodes == 1 else f"each of TRAIN1 to TRAIN{cluster.num_nodes}"
    if cluster.target_nodes and in_ray:
        found, environment = _of_ray(cluster, trains), f"{RAY_ADDRESS}=TARGET1:{_RAY_PORT} "
    elif cluster.target_nodes:
        per_node = target.num_replicas // cluster.target_nodes
        nodes = [f"TARGET{index + 1}" for index in range(cluster.target_nodes)]
        urls = [f"http://{node}:{_SERVER_PORT + index}" for node in nodes for index in range(per_node)]
        torchrun.append(f"vllm.servers=[{','.join(urls)}]")
        serve = ["scripts/serve_target", f"recipe={name}", *arguments, "--host", "0.0.0.0"]
        submit += ["--target-nodes", str(cluster.target_nodes)]
        if per_node > 1:
            serve += ["--servers", str(per_node)]
            submit += ["--servers-per-node", str(per_node)]
        found.append((" and ".join(nodes), shlex.join(serve)))
    found.append((trains if num_nodes > 1 else "the node", environment + shlex.join(torchrun)))
    in_slurm = not in_ray and not config.vllm.servers
    # A job has a process on each GPU.
    if num_nodes > 1 and in_slurm and cluster.processes_per_node == max(1, cluster.gpus_per_node):
        submit += ["--gpus-per-node", str(cluster.gpus_per_node)]
        found.append(("Slurm", shlex.join([*submit, f"recipe={name}", *arguments])))
    return found


def _of_ray(cluster: Cluster, trains: str) -> list[Command]:
    head, gpus = f"TARGET1:{_RAY_PORT}", f"--num-gpus={cluster.gpus_per_node}"
    found = [("TARGET1", f"ray start --head --port={_RAY_PORT} {gpus}")]
    if cluster.target_nodes > 1:
        others = f"each of TARGET2 to TARGET{cluster.target_nodes}"
        found.append((others, f"ray start --address={head} {gpus}"))
    # The GPUs that train are not Ray's.
    return [*found, (trains, f"ray start --address={head} --num-gpus=0")]
