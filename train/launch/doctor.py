"""What a machine has and lacks for a run: each check once, for scripts/doctor and for the start of a run.

A check of a run's start raises UserError where the run could not work; scripts/doctor shows it as a row.
"""

import asyncio
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import torch
from huggingface_hub import constants

from data.addresses import is_loopback, is_url
from data.cache import cache_directory
from data.capture.dispatch import Unavailable
from data.capture.torchspec.engines import check_installed
from data.capture.transport.mooncake_store import check_joinable, check_master
from data.capture.vllm.client import VllmClient
from data.capture.vllm.environment import (
    KEY_VARIABLE,
    check_mooncake,
    check_served,
    find_python,
    installed_version,
)
from data.conversations.files import is_file
from data.embedded.corpus import standard_library
from data.embedded.target import TargetSettings, fingerprint
from data.store.remote import check_protocol
from data.target.checkpoint import is_hub_id
from data.target.loading import check_attention
from data.target.served import architecture, serving_engines
from data.target.spec import TargetSpec
from eagle31.errors import UserError
from train.config.capture import CaptureMode, TransportKind
from train.config.data import SELF
from train.config.run import (
    RunConfig,
    Stage,
    captures_in_vllm,
    drafts_in_vllm,
    starts_vllm,
    uses_torchspec,
)
from train.config.target import EMBEDDED
from train.config.vllm import VllmConfig
from train.distributed import World
from train.drafter.published import fetch_checkpoint
from train.plan.disk import cached_repositories, disks, download_bytes, existing, host_memory
from train.plan.plan import make_plan
from train.plan.sizes import RunSizes
from train.plan.target import planned_config
from train.plan.work import data_summary
from train.tables import aligned, gigabytes
from train.target import Target
from train.tracking import check_wandb, wandb_mode
from train.versions import missing_packages, package_versions

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
    found = [_packages(), _gpus(config), *_shared_memory()]
    found.append(
        _asked("directories", lambda: check_start(config), "the run's directories can be written to")
    )
    try:
        found += _plan(config)
    except UserError as error:  # the target's configuration is not here, or contradicts the recipe
        found.append(Check("plan", LACKING, f"{error.field}={error.value}", error.remedy))
    if Path(config.target.model).is_dir():
        template = config.target.chat_template or "the tokenizer's"
        found.append(_asked("chat template", lambda: Target(config.target).template_fingerprint, template))
    for field, source in _sources(config).items():
        found.append(_asked(field, partial(_check_source, field, source), source))
    return [*found, *_programs(config), *asyncio.run(_servers(config)), *_credentials(config)]


def table(checks: Sequence[Check]) -> str:
    """Return a line for each check, with its remedy below."""
    rows = [(check.status, check.name, check.found) for check in checks]
    lines = []
    for line, check in zip(aligned(rows, text_columns=3), checks, strict=True):
        lines += [line, f"         {check.remedy}"] if check.remedy else [line]
    return "\n".join(lines)


# What a run asks before any work, and each check of these by itself.


def check_start(config: RunConfig) -> None:
    """Refuse a run that cannot write to one of its directories.

    Raises:
        UserError: the first of them.
    """
    check_writable("output_dir", Path(config.output_dir))
    if config.capture.spool_dir is not None:
        check_writable("capture.spool_dir", Path(config.capture.spool_dir))
    if _lacks_embedded(config):
        check_writable("EAGLE31_CACHE", cache_directory())


def check_named(config: RunConfig) -> None:
    """Refuse what the settings name and this machine lacks. It takes a second; nothing is downloaded.

    Raises:
        UserError: the first that cannot be used.
    """
    for field, source in _sources(config).items():
        _check_here(field, source)
    if config.target.model != EMBEDDED:
        target = Target(config.target)
        spec = target.spec
        _ = spec.torch_dtype
        check_attention(spec)
        if Path(spec.checkpoint.path).is_dir():
            spec.checkpoint.tensor_files()
            _ = target.template_fingerprint  # there is a chat template
    start = config.drafter.init_from
    if start is not None and not is_hub_id(start):
        fetch_checkpoint(start, None, "drafter.init_from")


def check_environment(config: RunConfig) -> None:
    """Refuse a run without the environment of its engines, or whose servers cannot reach its Mooncake.

    Raises:
        UserError: what is missing.
    """
    if any(uses_torchspec(config, stage) for stage in config.stages):
        check_installed()
    if config.capture.transport is TransportKind.mooncake:
        check_master(config.capture.mooncake.master, remote_servers(config.vllm))
    if starts_vllm(config):
        python = find_python()
        through_mooncake = config.capture.transport is TransportKind.mooncake
        if through_mooncake and joins_mooncake(config, set(config.stages)):
            check_mooncake(python)


def check_eagle3(config: RunConfig) -> None:
    """Raise UserError if the run needs vLLM for what it does not do with this target."""
    if captures_in_vllm(config):
        check_captured(config)
    elif drafts_in_vllm(config):
        _check_served(
            config, "In a run, that is vllm.engine_args.model_impl=transformers; or set target.engine=hf."
        )


def check_captured(config: RunConfig) -> None:
    """Raise UserError if vLLM does not capture hidden states of the target."""
    # With model_impl, vLLM 0.32 looks for the model that keeps the hidden states in transformers, too.
    remedy = (
        'To capture, set "vllm.engine_args.hf_overrides={architectures: [TransformersForCausalLM]}" instead '
        "of model_impl, or capture=hf or hf_online."
    )
    if config.vllm.engine_args.get("model_impl") == "transformers":
        raise UserError("vllm.engine_args.model_impl", "transformers", remedy)
    _check_served(config, remedy)


def _check_served(config: RunConfig, remedy: str) -> None:
    target = config.target
    spec = TargetSpec(target.model, target.revision, trust_remote_code=target.trust_remote_code)
    check_served("target.model", spec, planned_config(target), config.vllm.engine_args, remedy)


def check_store(config: RunConfig, stages: Set[Stage]) -> None:
    """Raise UserError if one of these stages needs a Mooncake store that this process cannot join."""
    if joins_mooncake(config, stages):
        check_joinable(config.capture.mooncake.master)


def check_writable(field: str, directory: Path) -> None:
    """Raise UserError if no file can be written below a directory, which may not exist yet. It is tried."""
    for path in (directory, directory / "artifacts"):  # an earlier run may have been another account's
        there, obstacle = existing(path), None
        try:
            with tempfile.TemporaryFile(dir=there) as file:
                file.write(b"eagle31")
        except NotADirectoryError:
            obstacle = f"{there} is a file"
        except OSError as error:
            obstacle = f"{there}: {os.strerror(error.errno or 0)}"
        if obstacle is not None:
            remedy = f"Nothing can be written there ({obstacle}); give a directory that this account can use."
            raise UserError(field, directory, remedy)


def check_port(field: str, port: int, host: str = "127.0.0.1") -> None:
    """Raise UserError if no server could listen on a port."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            probe.bind((host, port))
            probe.listen(1)
    except (OSError, OverflowError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        remedy = (
            f"Nothing can listen on {host}:{port} ({reason}); give another port, or end the program there."
        )
        raise UserError(field, port, remedy) from None


def remote_servers(vllm: VllmConfig) -> list[str]:
    """Return the URLs of the recipe's servers that are on other machines."""
    return [url for url in vllm.servers if not is_loopback(urlsplit(url).hostname)]


def joins_mooncake(config: RunConfig, stages: Set[Stage]) -> bool:
    """Whether one of these stages reads states from a Mooncake store."""
    online = config.capture.mode is CaptureMode.online and Stage.train in stages
    return config.capture.transport is TransportKind.mooncake and (online or Stage.capture in stages)


# The rows of scripts/doctor.


def _asked(name: str, question: Callable[[], object], found: str) -> Check:
    """Return a check that asks as the run does, which raises UserError where it could not work."""
    try:
        question()
    except UserError as error:
        return Check(name, LACKING, f"{error.field}={error.value}", error.remedy)
    return Check(name, OK, found)


def _packages() -> Check:
    found = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    if missing := missing_packages():
        remedy = "Run scripts/quickstart once, which makes .venv, then `source .venv/bin/activate`."
        return Check("packages", LACKING, f"without {', '.join(missing)}", remedy)
    return Check("packages", OK, found)


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
    sizes = RunSizes(config)
    world = World(0, 0, max(1, torch.cuda.device_count()))  # the user has not said how many processes
    plan = make_plan(config, world, data_summary(config))
    way = plan.first
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
    if (memory := host_memory(sizes, way.cluster)).parts:
        yield Check("host memory", LACKING if memory.remedy else OK, str(memory), memory.remedy)
    model, missing = config.target.model, download_bytes(sizes)
    if missing and constants.HF_HUB_OFFLINE:
        remedy = f"HF_HUB_OFFLINE is set: download it first (hf download {model}), or give a directory."
        yield Check("target", LACKING, f"{model}, {gigabytes(missing)} not cached", remedy)
    else:
        yield Check("target", OK, f"{model}, {gigabytes(missing)} to download" if missing else model)


def _sources(config: RunConfig) -> dict[str, str]:
    """Return where data and a given store come from that are not made here, by field."""
    data = config.data
    given = {"data.train": data.train, "data.eval": data.eval, "capture.store": config.capture.store}
    given |= {f"data.sources.{name}": one.source for name, one in data.sources.items()}
    return {field: source for field, source in given.items() if source not in (None, EMBEDDED, SELF)}


def _check_source(field: str, source: str) -> None:
    """Raise UserError if a source is not here and cannot be downloaded."""
    here = _check_here(field, source)
    if is_url(source):
        check_protocol(source)
    elif here:
        path = Path(source).expanduser()
        if path.exists() and not os.access(path, os.R_OK):
            raise UserError(field, source, "This account may not read it: change its mode or its owner.")
    elif constants.HF_HUB_OFFLINE and ("dataset", source) not in cached_repositories():
        remedy = f"HF_HUB_OFFLINE is set: download it first (hf download {source} --repo-type dataset)."
        raise UserError(field, source, remedy)


def _check_here(field: str, source: str) -> bool:
    """Return whether a source is on this machine, else on the Hub; raise UserError if it cannot be either."""
    if is_url(source):
        return False
    there = Path(source).expanduser().is_dir()
    if field == "capture.store" and not there:
        raise UserError(field, source, "Give a finished store, or null to capture.")
    return there or is_file(source, field)


def _lacks_embedded(config: RunConfig) -> bool:
    """Whether the run trains the embedded target first, because it uses it and the cache does not have it."""
    used = EMBEDDED in (config.target.model, config.data.train, config.data.eval)
    used = used or any(one.source == EMBEDDED for one in config.data.sources.values())
    made = cache_directory() / EMBEDDED / fingerprint(standard_library(), TargetSettings())
    return used and not made.is_dir()


def _programs(config: RunConfig) -> Iterator[Check]:
    """Yield vLLM's environment and Mooncake, where the run uses them."""
    if starts_vllm(config):
        check = _asked("vLLM", lambda: check_environment(config), "")
        if check.status == OK:
            version = installed_version(find_python())
            tested = version is not None and version.startswith(f"{VLLM}.")
            remedy = "" if tested else f"The tests have run with {VLLM}, which scripts/setup/vllm installs."
            status = OK if tested else WARNING if version else LACKING
            check = Check("vLLM", status, version or f"no vLLM in {find_python()}", remedy)
        yield check
    if joins_mooncake(config, set(config.stages)):
        master = config.capture.mooncake.master
        yield _asked("Mooncake", lambda: check_joinable(master), f"{master} answers")


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


def _credentials(config: RunConfig, environment: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Yield keys and tokens that the run uses. None is ever printed."""
    if remote_servers(config.vllm):
        remedy = "" if environment.get(KEY_VARIABLE) else "Export it as where the servers were started."
        yield Check(KEY_VARIABLE, LACKING if remedy else OK, "not set" if remedy else "set", remedy)
    check = _asked("W&B", check_wandb, "")
    yield replace(check, found=wandb_mode()) if check.status == OK else check
