"""The vLLM engines of a run: the recipe's servers, or an engine that the run starts itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.transport.protocol import Transport
from data.transport.spool import MEMORY
from data.vllm.arguments import CaptureEngine
from data.vllm.client import check_server
from data.vllm.dispatch import PATIENCE_SECONDS
from data.vllm.endpoint import Endpoint
from data.vllm.engine import LocalEngine
from data.vllm.producer import VllmProducer
from data.vllm.server import VllmServer
from train.config.capture import CaptureConfig, CaptureMode, TransportKind
from train.config.vllm import VllmConfig
from train.inference.target import CapturedTarget


def capture_engine(
    target: CapturedTarget,
    capture: CaptureConfig,
    engine_args: Mapping[str, Any],
    *,
    max_tokens: int,
    output_dir: Path,
) -> CaptureEngine:
    """Return an engine that captures the target's states and writes its completions.

    Args:
        engine_args: the recipe's `vllm.engine_args`.
        max_tokens: length of the longest sample, and of the longest prompt with its completion.
        output_dir: the run's directory, below which the engine may write.
    """
    online = capture.mode is CaptureMode.online
    roots = [str(output_dir.resolve())]
    if online and capture.transport is not TransportKind.mooncake:
        roots.append(str(Path(capture.spool_dir or MEMORY).resolve()))
    over_mooncake = online and capture.transport is TransportKind.mooncake
    return CaptureEngine(
        target=target.spec.checkpoint.path,
        revision=target.spec.revision,
        dtype=str(target.parts.embed_tokens.dtype).removeprefix("torch."),
        trust_remote_code=target.spec.trust_remote_code,
        target_fingerprint=target.parts.fingerprint,
        aux_layer_ids=target.aux_layer_ids,
        num_layers=target.parts.num_layers,
        max_tokens=max_tokens,
        roots=roots,
        mla=target.mla,
        mooncake_masters=[capture.mooncake.master] if over_mooncake else [],
        extra=engine_args,
    )


def capture_endpoints(vllm: VllmConfig, engine: CaptureEngine, log: Path) -> list[Endpoint]:
    """Return the recipe's servers, or a local engine that captures; nothing is started yet."""
    return _servers(vllm) or [LocalEngine.of(engine, log)]


def completion_endpoints(vllm: VllmConfig, engine: CaptureEngine, log: Path) -> list[Endpoint]:
    """Return the recipe's servers, or a local engine that only writes; nothing is started yet."""
    return _servers(vllm) or [LocalEngine(engine.answer_arguments(), log)]


def vllm_producer(
    endpoints: list[Endpoint], transport: Transport, target: CapturedTarget, max_tokens: int
) -> VllmProducer:
    """Return a producer that has vLLM put the target's states into the transport.

    Args:
        max_tokens: length of the longest sample.
    """
    expected = target.expected_states()
    spool = transport.to_json().get("spool")
    directory = None if spool is None else Path(spool)
    return VllmProducer(
        endpoints,
        transport,
        check=lambda endpoint, info: check_server(endpoint, info, expected, directory, max_tokens),
        patience_seconds=PATIENCE_SECONDS,
    )


def _servers(vllm: VllmConfig) -> list[Endpoint]:
    return [VllmServer(url, vllm.max_concurrency) for url in vllm.servers]
