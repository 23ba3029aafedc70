"""What a run asks of its machine before any work: each check raises UserError where it could not work."""

import os
import socket
import tempfile
from pathlib import Path

from data.addresses import is_url
from data.capture.torchspec.engines import check_installed
from data.capture.vllm.environment import check_served, find_python
from data.conversations.files import is_file
from data.target.checkpoint import is_hub_id
from data.target.loading import check_attention
from data.target.spec import TargetSpec
from eagle31.errors import UserError
from train.artifact import artifacts_dir
from train.config.data import SELF
from train.config.run import RunConfig, captures_in_vllm, drafts_in_vllm, starts_vllm, uses_torchspec
from train.config.target import EMBEDDED
from train.drafter.published import fetch_checkpoint
from train.plan.disk import existing
from train.plan.target import planned_config
from train.target import Target


def check_start(config: RunConfig) -> None:
    """Refuse a run that cannot write to one of its directories.

    Raises:
        UserError: the first of them.
    """
    check_writable("output_dir", Path(config.output_dir))
    check_writable("artifacts_dir", artifacts_dir(config))  # an earlier run may have been another account's
    if config.capture.spool_dir is not None:
        check_writable("capture.spool_dir", Path(config.capture.spool_dir))


def check_named(config: RunConfig) -> None:
    """Refuse what the settings name and this machine lacks. It takes a second; nothing is downloaded.

    Raises:
        UserError: the first that cannot be used.
    """
    for field, source in named_sources(config).items():
        check_here(field, source)
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
    """Refuse a run without the environment of its engines.

    Raises:
        UserError: what is missing.
    """
    if any(uses_torchspec(config, stage) for stage in config.stages):
        check_installed()
    if starts_vllm(config):
        find_python()


def check_eagle3(config: RunConfig) -> None:
    """Raise UserError if the run needs vLLM for what it does not do with this target."""
    if captures_in_vllm(config):
        check_captured(config)
    elif drafts_in_vllm(config):
        remedy = "In a run, that is vllm.engine_args.model_impl=transformers; or set target.engine=hf."
        _check_served(config, remedy)


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


def check_writable(field: str, directory: Path) -> None:
    """Raise UserError if no file can be written below a directory, which may not exist yet. It is tried."""
    there = existing(directory)
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"eagle31")
    except OSError as error:
        reason = f"{there}: {os.strerror(error.errno or 0)}"
        remedy = f"Nothing can be written there ({reason}); give a directory that this account can use."
        raise UserError(field, directory, remedy) from None


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


def named_sources(config: RunConfig) -> dict[str, str]:
    """Return where data and a given store come from that are not made here, by field."""
    data = config.data
    given = {"data.train": data.train, "data.eval": data.eval, "capture.store": config.capture.store}
    given |= {f"data.sources.{name}": one.source for name, one in data.sources.items()}
    return {field: source for field, source in given.items() if source not in (None, EMBEDDED, SELF)}


def check_here(field: str, source: str) -> bool:
    """Return whether a source is on this machine, else on the Hub; raise UserError if it cannot be either."""
    if is_url(source):
        return False
    there = Path(source).expanduser().is_dir()
    if field == "capture.store" and not there:
        raise UserError(field, source, "Give a finished store, or null to capture.")
    return there or is_file(source, field)
