"""Examines the machine for a run, or the part of it that a failure is about."""

import os
import resource
import socket
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from pathlib import Path

from data.vllm.environment import KEY_VARIABLE
from eagle31.errors import UserError
from train.config.run import RunConfig, pushes, uses_vllm
from train.conversations.sources import evaluation_sets, evaluation_source, training_sources
from train.doctor import accounts, directories, environment, gpus, inputs, machine, network, programs
from train.doctor.check import Check, Status, ok, refusal, refuse_lacking
from train.doctor.needs import Needs
from train.planning.memory_check import gigabytes
from train.requirements import engine_joins_mooncake, mooncake_clients, remote_servers, starts_vllm
from train.tracking import wandb_mode


class Topic(Enum):
    """What checks are about, so that a failure can be explained by those that concern it."""

    environment = "environment"
    disk = "disk"
    permission = "permission"
    locks = "locks"
    memory = "memory"
    limits = "limits"
    gpus = "gpus"
    inputs = "inputs"
    vllm = "vllm"
    servers = "servers"
    ports = "ports"
    services = "services"


def examine(config: RunConfig, topics: Iterable[Topic] = Topic) -> list[Check]:
    """Return the checks of this machine for a run.

    Args:
        topics: those that are looked at.
    """
    needs, chosen = Needs(config), set(topics)
    found: list[Check] = []
    for topic, check in _CHECKS:
        if topic in chosen:
            try:
                found += check(needs)
            except UserError as error:  # the plan cannot be made
                found.append(refusal(error.field, "what the plan needs", error))
    return list(dict.fromkeys(found))


def check_start(config: RunConfig) -> None:
    """Refuse a run that cannot write its results, or listen where the recipe says, before any work.

    Raises:
        UserError: the first thing that is lacking.
    """
    refuse_lacking(written_directories(config))


def environment_checks(needs: Needs) -> Iterator[Check]:
    yield from environment.environment_checks()


def directory_checks(needs: Needs) -> Iterator[Check]:
    """Yield whether this account can write where the run does."""
    yield from written_directories(needs.config)
    yield directories.umask_check(directories.own_umask())
    if needs.download_bytes:
        yield directories.writable_check("HF cache", "HF_HOME", inputs.hub_cache())


def written_directories(config: RunConfig) -> Iterator[Check]:
    """Yield whether this account can write the run's own directories; a run refuses to start otherwise."""
    yield directories.writable_check("output_dir", "output_dir", Path(config.output_dir))
    if inputs.lacks_embedded(config):
        yield directories.writable_check("cache_dir", "cache_dir", Path(config.cache_dir))
    else:
        loss = "Without it, hashes are not remembered, and each start reads the target's files again."
        cache = Path(config.cache_dir)
        yield directories.writable_check("cache_dir", "cache_dir", cache, Status.warning, loss)
    capture = config.capture
    for name, given in (("spool_dir", capture.spool_dir),):
        if given is not None:
            yield directories.writable_check(f"capture.{name}", f"capture.{name}", Path(given))
    if capture.spool_dir is not None:
        key = "capture.spool_dir"
        yield directories.own_directory_check(key, key, Path(capture.spool_dir))


def disk_checks(needs: Needs) -> Iterator[Check]:
    """Yield whether the disks have room for what the run writes and downloads."""
    yield from directories.space_checks(needs.space_uses())


def lock_checks(needs: Needs) -> Iterator[Check]:
    yield directories.lock_check(needs.output_dir)
    yield directories.clock_check(needs.output_dir)


def memory_checks(needs: Needs) -> Iterator[Check]:
    """Yield whether memory and shared memory suffice."""
    if needs.on_other_machines:
        return
    found = gpus.found_gpus()
    available = machine.available_memory()
    if needs.num_gpus and not found:
        yield ok("memory", f"{gigabytes(available)} available")
    else:
        yield machine.memory_check(available, *needs.memory)
    shared, what = needs.shared_memory(len(found))
    remedy = "Mount it larger (Docker: --shm-size), lower capture.spool_gb, or set capture.spool_dir."
    yield machine.shared_memory_check(machine.free_shared_memory(), shared, what, remedy)
    registers = needs.registers_memory if machine.has_infiniband() else None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield machine.locked_memory_check(limit, registers)


def limit_checks(needs: Needs) -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield machine.open_files_check(soft, hard, needs.open_files)


def gpu_checks(needs: Needs) -> Iterator[Check]:
    """Yield whether the GPUs suffice for the plan."""
    config = needs.config
    if needs.on_other_machines:
        nodes, each = config.launcher.nodes, config.launcher.gpus_per_node
        yield ok("GPUs", "not looked at: run it on a node", f"{nodes} nodes of {each}")
        return
    found = gpus.found_gpus()
    described = config.plan.gpu_memory_gb
    yield gpus.count_check(found, needs.num_gpus, None if described is None else int(described * 1e9))
    driver = gpus.driver_check(gpus.driver_version(), gpus.cuda_version(), len(found))
    if driver is not None:
        yield driver
    if not found:
        return
    yield gpus.plan_check(needs.plan)
    drafter = needs.sizes.drafter
    method = getattr(needs.sizes.target_config, "quantization_config", None) or {}
    yield from gpus.capability_checks(
        found,
        bf16=config.deepspeed.precision.value == "bf16",
        head_dim=drafter.head_dim,
        in_vllm=starts_vllm(config),
        fp8_target=isinstance(method, dict) and method.get("quant_method") == "fp8",
    )
    interfaces = [name for _, name in socket.if_nameindex()]
    nccl = gpus.nccl_check(gpus.nccl_version(), len(found), os.environ, interfaces)
    if nccl is not None:
        yield nccl


def input_checks(needs: Needs) -> Iterator[Check]:
    """Yield whether target, data and a given store are here."""
    config = needs.config
    cached, offline = inputs.cached_bytes(), inputs.is_offline()

    def as_given(source: str, evaluation: bool) -> str:
        return source

    held_out = evaluation_source(config.data, as_given)
    sources = [*training_sources(config.data, as_given).values(), *([held_out] if held_out else [])]
    sources += evaluation_sets(config, as_given).values()
    known = frozenset(name for kind, name in cached if kind == "dataset")
    yield from inputs.data_checks(sources, known, offline)
    store = config.capture.store
    if store is not None:
        yield programs.store_check(store)
    model = config.target.model
    yield inputs.target_check(model, needs.download_bytes, cached.get(("model", model), 0), offline)


def vllm_checks(needs: Needs) -> Iterator[Check]:
    config = needs.config
    if not needs.on_other_machines or uses_vllm(config):
        yield programs.vllm_check(starts_vllm(config))
    if needs.joins_mooncake:
        yield programs.mooncake_check(config.capture.mooncake.master, mooncake_clients(config))
    if engine_joins_mooncake(config):
        yield programs.engine_mooncake_check()


def server_checks(needs: Needs) -> Iterator[Check]:
    config = needs.config
    key = accounts.server_key_check(os.environ, KEY_VARIABLE, bool(remote_servers(config.vllm)))
    if key is not None:
        yield key
    if config.vllm.servers:
        yield from network.servers_checks(config.vllm.servers, config.target.model, needs.aux_layer_ids)


def port_checks(needs: Needs) -> Iterator[Check]:
    """Yield whether ports are free that the run listens on here."""
    config = needs.config
    if not needs.on_other_machines:
        yield network.master_port_check(os.environ, config.launcher.nodes)


def service_checks(needs: Needs) -> Iterator[Check]:
    """Yield whether tokens and other programs are there that the run reports to or starts with."""
    config = needs.config
    yield accounts.hub_check(config.hub, pushes(config))
    yield accounts.tracking_check(wandb_mode())
    if needs.on_other_machines:
        yield programs.slurm_check(config.launcher.partition)


_CHECKS: tuple[tuple[Topic, Callable[[Needs], Iterable[Check]]], ...] = (
    (Topic.environment, environment_checks),
    (Topic.gpus, gpu_checks),
    (Topic.memory, memory_checks),
    (Topic.limits, limit_checks),
    (Topic.permission, directory_checks),
    (Topic.disk, disk_checks),
    (Topic.locks, lock_checks),
    (Topic.inputs, input_checks),
    (Topic.vllm, vllm_checks),
    (Topic.servers, server_checks),
    (Topic.ports, port_checks),
    (Topic.services, service_checks),
)
