"""What a run needs of its machine, from its configuration and its plan."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from data.transport.spool import MEMORY
from eagle31.errors import UserError
from train.config.capture import CaptureMode, CaptureSource
from train.config.launcher import LauncherKind
from train.config.run import RunConfig, Stage, uses_vllm
from train.distributed import World
from train.doctor.directories import SpaceUse, directory_bytes
from train.doctor.inputs import cached_bytes, hub_cache, is_downloaded, lacks_embedded
from train.inference.transport import chosen_transport
from train.planning.plan import Plan, make_plan
from train.planning.server_memory import Parallelism
from train.planning.sizes import RunSizes
from train.planning.work import newest_data_summary
from train.requirements import joins_mooncake

# An estimate of what a process has open: data sets, shards, connections to other processes. A run of one
# process on a small target works with 64.
_OPEN_FILES = 256
_FILES_PER_REQUEST = 2
# Of the embedded target and its conversations.
_EMBEDDED_BYTES = 30_000_000
# Imported libraries of one process, torch and transformers among them.
_PROCESS_BYTES = 1_000_000_000
# Buffers of NCCL in shared memory. Source: NCCL's troubleshooting page, for containers.
_SHARED_BYTES = 1_000_000_000
_DOWNLOADED = 0.1  # of a model's size: what may be missing where it counts as complete
_WIDE = 4  # bytes of a float32


@dataclass(frozen=True)
class Needs:
    """The needs of one run on the machine at hand.

    Raises:
        UserError: from properties that read the plan, where the recipe contradicts the target.
    """

    config: RunConfig

    @property
    def sizes(self) -> RunSizes:
        if isinstance(self._sizes, UserError):
            raise self._sizes
        return self._sizes

    @cached_property
    def _sizes(self) -> RunSizes | UserError:
        """The sizes, or why there are none: a Hub that does not answer is asked once."""
        sizes = RunSizes(self.config)
        try:
            _ = sizes.target_config
        except UserError as error:
            return error
        return sizes

    @cached_property
    def plan(self) -> Plan:
        """The plan for the GPUs at hand, or those that the recipe describes."""
        world = World.from_environment()
        _ = self.sizes
        planned = self.config
        if world.size == 1:  # the user has not said how many processes there will be
            planned = replace(self.config, stages=[Stage.plan])
        return make_plan(planned, world, newest_data_summary(self.output_dir))

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir)

    @property
    def on_other_machines(self) -> bool:
        """Whether the run's processes start on nodes of Slurm, and this machine only submits it."""
        return self.config.launcher.kind is LauncherKind.slurm

    @property
    def num_gpus(self) -> int:
        """The GPUs of this machine that the recipe is planned for; 0 for none, or on other machines."""
        plan, launcher = self.config.plan, self.config.launcher
        if self.on_other_machines or launcher.gpus_per_node == 0 or plan.gpu_memory_gb is None:
            return 0
        if uses_vllm(self.config) and not self.config.vllm.servers:
            return Parallelism.of(self.config.vllm.engine_args).gpus
        return 1

    @property
    def is_online(self) -> bool:
        return self.config.capture.mode is CaptureMode.online

    @property
    def spool(self) -> Path | None:
        """The directory of online states; None without a spool."""
        if not self.is_online:
            return None
        chosen = chosen_transport(self.config.capture, self.config.vllm, self.output_dir)
        return None if chosen.mooncake else chosen.spool_dir

    @property
    def spool_bytes(self) -> int:
        return int(self.config.capture.spool_gb * 1e9)

    def shared_memory(self, num_processes: int) -> tuple[int, str]:
        """Return the bytes that the run takes in /dev/shm, and what takes them."""
        if self.spool == MEMORY:
            return self.spool_bytes + _SHARED_BYTES * (num_processes > 1), "capture.spool_gb"
        return (_SHARED_BYTES, "several processes") if num_processes > 1 else (0, "")

    def space_uses(self) -> Iterator[SpaceUse]:
        """Yield what the run writes and downloads, by directory."""
        there = directory_bytes(self.output_dir)
        if self.store_bytes:
            remedy = (
                "Free some space, lower capture.max_samples, or set capture.codec=fp8 or capture.mode=online."
            )
            yield SpaceUse(self.output_dir, "store", max(0, self.store_bytes - there), remedy)
            there = max(0, there - self.store_bytes)
        remedy = "Free some space, or lower train.keep_checkpoints."
        left = max(0, self.checkpoint_bytes - there)
        yield SpaceUse(self.output_dir, "checkpoints and export", left, remedy)
        if lacks_embedded(self.config):
            remedy = "Free some space, or give another cache_dir."
            yield SpaceUse(Path(self.config.cache_dir), "embedded target", _EMBEDDED_BYTES, remedy)
        if self.download_bytes:
            remedy = "Free some space, or set HF_HOME to a directory on a larger disk."
            yield SpaceUse(hub_cache(), "the target's weights", self.download_bytes, remedy)
        if self.spool is not None and self.spool != MEMORY:
            remedy = "Lower capture.spool_gb, or give a larger disk."
            yield SpaceUse(self.spool, "spool", self.spool_bytes, remedy)

    @cached_property
    def download_bytes(self) -> int:
        """The bytes of the target's weights that the Hub's cache lacks; 0 where nothing is missing."""
        model = self.config.target.model
        if not is_downloaded(model):
            return 0
        size = self.sizes.target.checkpoint_bytes
        missing = size - cached_bytes().get(("model", model), 0)
        return missing if missing > _DOWNLOADED * size else 0

    @property
    def store_bytes(self) -> int:
        """The bytes of the store; 0 where there is none, or where the tokens are unknown yet."""
        return 0 if self.is_online else self.plan.work.store_bytes or 0

    @property
    def checkpoint_bytes(self) -> int:
        """The bytes of the checkpoints, one more than are kept, and of three copies of the weights."""
        train, count = self.config.train, self.sizes.num_parameters
        states = 3 if train.ema_decay is None else 4  # float32 weights and two moments
        return _WIDE * count * (states * (train.keep_checkpoints + 1) + 3)

    @property
    def memory(self) -> tuple[int, str]:
        """The bytes outside GPUs, and what takes them."""
        if torch.cuda.is_available():
            held = self.spool_bytes if self.spool == MEMORY else 0
            offloaded = self.config.deepspeed.offload_optimizer
            optimizer = _WIDE * 3 * self.sizes.num_parameters if offloaded else 0
            what = "processes" + (", spool" if held else "") + (", optimizer" if optimizer else "")
            return held + optimizer + 4 * _PROCESS_BYTES * torch.cuda.device_count(), what
        training = self.plan.layout.memory.total
        needed = max(training, self.sizes.target.checkpoint_bytes) + _PROCESS_BYTES
        return needed, "training and the target"

    @property
    def open_files(self) -> int:
        """The files and connections that a process has open at most."""
        vllm, requests = self.config.vllm, 0
        if uses_vllm(self.config):
            requests = vllm.max_concurrency * max(1, len(vllm.servers))
        return _OPEN_FILES + _FILES_PER_REQUEST * requests

    @property
    def registers_memory(self) -> str | None:
        """What registers memory with a network card; None where nothing does."""
        if self.config.capture.mooncake.protocol == "rdma" and self.joins_mooncake:
            return "Mooncake over RDMA"
        return "InfiniBand" if self.config.launcher.nodes > 1 and not self.on_other_machines else None

    @property
    def joins_mooncake(self) -> bool:
        return joins_mooncake(self.config, set(self.config.stages))

    @property
    def aux_layer_ids(self) -> list[int] | None:
        """The aux layer ids that servers must capture; None where they capture none, or it is unknown."""
        if self.config.capture.source is not CaptureSource.vllm:
            return None
        try:
            return list(self.sizes.drafter.aux_layer_ids)
        except UserError:
            return None
