"""What a machine has and lacks for a run: the rows of scripts/doctor."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import torch
from huggingface_hub import constants

from data.addresses import is_url
from data.capture.dispatch import Unavailable
from data.capture.vllm.client import VllmClient
from data.capture.vllm.environment import KEY_VARIABLE, find_python, installed_version
from data.store.remote import check_protocol
from data.target.served import architecture, serving_engines
from eagle31.errors import UserError
from train.config.run import RunConfig, starts_vllm
from train.distributed import World
from train.launch.start import check_eagle3, check_environment, check_here, check_start, named_sources
from train.plan.disk import cached_repositories, disks, download_bytes, host_memory
from train.plan.plan import make_plan
from train.tables import aligned, gigabytes
from train.target import Target
from train.tracking import check_wandb, wandb_mode

OK, WARNING, LACKING = "ok", "warning", "lacking"
VLLM = "0.32"  # with which the tests have run
_ANSWER_SECONDS = 10.0
_SHARED_BYTES = 1_000_000_000  # of NCCL's buffers. Source: NCCL's troubleshooting page, for containers.


@dataclass(frozen=True)
class Check:
    """What a check found.

    Args:
        status: "ok", "warning" (the run can start; it may be slow, or fail later) or "lacking".
        remedy: what to do, in full sentences; empty where nothing is to be done.
    """

    name: str
    status: str
    found: str
    remedy: str = ""


def examine(config: RunConfig) -> list[Check]:
    """Return the checks of this machine for a run; nothing is started, downloaded or changed."""
    directories = _asked("directories", lambda: check_start(config), "can be written to")
    found = [_gpus(config), *_shared_memory(), directories]
    try:
        found += _plan(config)
    except UserError as error:  # the target's configuration is not here, or contradicts the recipe
        found.append(Check("plan", LACKING, f"{error.field}={error.value}", error.remedy))
    if Path(config.target.model).is_dir():
        template = config.target.chat_template or "the tokenizer's"
        found.append(_asked("chat template", lambda: Target(config.target).template_fingerprint, template))
    for field, source in named_sources(config).items():
        found.append(_asked(field, partial(_check_source, field, source), source))
    return [*found, *_programs(config), *asyncio.run(_servers(config)), *_credentials(config)]


def table(checks: Sequence[Check]) -> str:
    """Return a line for each check, with its remedy below."""
    rows = [(check.status, check.name, check.found) for check in checks]
    lines = []
    for line, check in zip(aligned(rows, text_columns=3), checks, strict=True):
        lines += [line, f"         {check.remedy}"] if check.remedy else [line]
    return "\n".join(lines)


def _asked(name: str, question: Callable[[], object], found: str) -> Check:
    """Return a check that asks as the run does, which raises UserError where it could not work."""
    try:
        question()
    except UserError as error:
        return Check(name, LACKING, f"{error.field}={error.value}", error.remedy)
    return Check(name, OK, found)


def _shared_memory() -> Iterator[Check]:
    if torch.cuda.device_count() > 1:
        free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
        found = f"{gigabytes(free)} free, {gigabytes(_SHARED_BYTES)} needed by NCCL"
        good = free >= _SHARED_BYTES
        remedy = "" if good else "Mount it larger (Docker: --shm-size)."
        yield Check("/dev/shm", OK if good else LACKING, found, remedy)


def _gpus(config: RunConfig) -> Check:
    described = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    kinds = sorted({f"{one.name} of {gigabytes(one.total_memory)}" for one in described})
    driver, planned = _driver_version(), config.plan.gpu_memory_gb
    if described:
        return Check("GPUs", OK, f"{len(described)} x {', '.join(kinds)}, driver {driver}")
    if driver is not None:
        remedy = (
            f"nvidia-smi finds a GPU and torch {torch.__version__} none: install one for this driver, and "
            "unset CUDA_VISIBLE_DEVICES; `python -c 'import torch; torch.cuda.init()'` names the reason."
        )
        return Check("GPUs", LACKING, f"driver {driver}, no GPU in torch", remedy)
    if planned is not None:
        remedy = "Run it on a machine with GPUs, or try the pipeline with recipe=quickstart here."
        return Check("GPUs", LACKING, f"none; planned for GPUs of {planned:.0f} GB", remedy)
    return Check("GPUs", OK, "none; none are planned for")


def _driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None where nvidia-smi does not report one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split()[0] if done.returncode == 0 and done.stdout.split() else None


def _plan(config: RunConfig) -> Iterator[Check]:
    """Yield whether the run fits this machine's GPUs and disks, and whether its target is or can be here."""
    world = World(0, 0, max(1, torch.cuda.device_count()))  # the user has not said how many processes
    plan = make_plan(config, world)
    sizes, way = plan.sizes, plan.first
    reasons = [way.refusal] if way.refusal else [str(one) for one in way.shortages]
    found = f"{gigabytes(way.memory.total)} for training"
    if way.target is not None:
        found += f"; target: {way.target.where}"
    yield Check("plan", OK if way.works else LACKING, found, " ".join(map(str, reasons)))
    name = architecture(sizes.target_config)
    if name is not None:
        engines = f"{', '.join(serving_engines(name)) or 'no engine that is known'} ({name})"
        check = _asked("served by", lambda: check_eagle3(config), engines)
        if check.status == OK and plan.unserved:
            check = replace(check, status=WARNING, remedy=plan.unserved)
        yield check
    for disk in disks(sizes, plan.work):
        yield Check("disk", LACKING if disk.remedy else OK, str(disk), disk.remedy)
    if (memory := host_memory(sizes, way.cluster)).uses:
        yield Check("host memory", LACKING if memory.remedy else OK, str(memory), memory.remedy)
    model, missing = config.target.model, download_bytes(sizes)
    if missing and constants.HF_HUB_OFFLINE:
        remedy = f"HF_HUB_OFFLINE is set: download it first (hf download {model}), or give a directory."
        yield Check("target", LACKING, f"{model}, {gigabytes(missing)} not cached", remedy)
    else:
        yield Check("target", OK, f"{model}, {gigabytes(missing)} to download" if missing else model)


def _check_source(field: str, source: str) -> None:
    """Raise UserError if a source is not here and cannot be downloaded."""
    here = check_here(field, source)
    if is_url(source):
        check_protocol(source)
    elif here:
        path = Path(source).expanduser()
        if path.exists() and not os.access(path, os.R_OK):
            raise UserError(field, source, "This account may not read it: change its mode or its owner.")
    elif constants.HF_HUB_OFFLINE and ("dataset", source) not in cached_repositories():
        remedy = f"HF_HUB_OFFLINE is set: download it first (hf download {source} --repo-type dataset)."
        raise UserError(field, source, remedy)


def _programs(config: RunConfig) -> Iterator[Check]:
    """Yield vLLM's environment, where the run uses it."""
    if starts_vllm(config):
        check = _asked("vLLM", lambda: check_environment(config), "")
        if check.status == OK:
            version = installed_version(find_python())
            tested = version is not None and version.startswith(f"{VLLM}.")
            remedy = "" if tested else f"The tests have run with {VLLM}, which scripts/setup/vllm installs."
            status = OK if tested else WARNING if version else LACKING
            check = Check("vLLM", status, version or f"no vLLM in {find_python()}", remedy)
        yield check


async def _servers(config: RunConfig) -> list[Check]:
    """Return whether the servers of the recipe answer, accept this process's key and run the target."""

    async def ask(url: str) -> Check:
        name, server = f"server {urlsplit(url).netloc}", VllmClient(url, 1)
        remedy = "Start it with scripts/serve_target and the settings of this run, or correct vllm.servers."
        try:
            info = await asyncio.wait_for(server.info(), _ANSWER_SECONDS)
        except (TimeoutError, Unavailable) as error:
            return Check(name, LACKING, f"no answer {error}".rstrip(), remedy)
        except UserError as error:
            return Check(name, LACKING, "refuses", str(error))
        finally:
            await server.close()
        # The run compares the weights, which may be elsewhere under another name.
        same = info.model == config.target.model
        return Check(name, OK if same else WARNING, f"runs {info.model}", "" if same else remedy)

    return list(await asyncio.gather(*map(ask, config.vllm.servers)))


def _credentials(config: RunConfig) -> Iterator[Check]:
    """Yield keys and tokens that the run uses. None is ever printed."""
    if config.vllm.remote_servers:
        remedy = "" if os.environ.get(KEY_VARIABLE) else "Export it as where the servers were started."
        yield Check(KEY_VARIABLE, LACKING if remedy else OK, "not set" if remedy else "set", remedy)
    check = _asked("W&B", check_wandb, "")
    yield replace(check, found=wandb_mode()) if check.status == OK else check
