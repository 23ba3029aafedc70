"""The engine that a run's vLLM servers are, and the producer that sends prompts to them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.transport.protocol import Transport
from data.vllm.arguments import CaptureEngine
from data.vllm.client import check_server
from data.vllm.endpoint import Endpoint
from data.vllm.producer import VllmProducer
from eagle31.errors import UserError
from train.config.capture import CaptureConfig, TransportKind
from train.inference.target import CapturedTarget
from train.inference.transport import server_roots

_BLOCK_TOKENS = 128  # the largest block that vLLM chooses


def capture_engine(
    target: CapturedTarget,
    capture: CaptureConfig,
    engine_args: Mapping[str, Any],
    *,
    max_tokens: int,
    output_dir: Path,
) -> CaptureEngine:
    """Return the engine that captures the target's states, offline and online, and writes its completions.

    Args:
        engine_args: further arguments of `vllm.LLM`, such as the recipe's `vllm.engine_args`.
        max_tokens: length of the longest sample, and of the longest prompt with its completion.
        output_dir: the run's directory, below which the engine may write.

    Raises:
        UserError: `capture.max_pending_gb` does not hold the states of the longest sample.
    """
    needed_gb = pending_gb(target, max_tokens)
    if capture.max_pending_gb is not None and capture.max_pending_gb < needed_gb:
        remedy = f"The states of {max_tokens} tokens take {needed_gb:.3f} GB: give at least that, or null."
        raise UserError("capture.max_pending_gb", capture.max_pending_gb, remedy)
    over_mooncake = capture.transport is TransportKind.mooncake
    return CaptureEngine(
        target=target.spec.checkpoint.path,
        revision=target.spec.revision,
        dtype=str(target.parts.embed_tokens.dtype).removeprefix("torch."),
        trust_remote_code=target.spec.trust_remote_code,
        target_fingerprint=target.parts.fingerprint,
        aux_layer_ids=target.aux_layer_ids,
        num_layers=target.parts.num_layers,
        max_tokens=max_tokens,
        roots=server_roots(capture, output_dir),
        mla=target.mla,
        mooncake_masters=[capture.mooncake.master] if over_mooncake else [],
        max_pending_gb=capture.max_pending_gb,
        extra=engine_args,
    )


def pending_gb(target: CapturedTarget, num_tokens: int) -> float:
    """Return the host memory that the states of a sample take in vLLM, in 10^9 bytes."""
    expected = target.expected_states()
    layers = len({*expected.aux_layer_ids, expected.num_layers})
    rounded = num_tokens + _BLOCK_TOKENS  # vLLM's cache is copied in blocks
    return rounded * layers * expected.hidden_size * expected.dtype.itemsize / 1e9


def vllm_producer(
    endpoints: Sequence[Endpoint],
    transport: Transport,
    target: CapturedTarget,
    max_tokens: int,
    patience_seconds: float,
) -> VllmProducer:
    """Return a producer that has vLLM put the target's states into the transport.

    Args:
        max_tokens: length of the longest sample.
        patience_seconds: how long all servers may be away at once.
    """
    expected = target.expected_states()
    spool = transport.to_json().get("spool")
    directory = None if spool is None else Path(spool)
    return VllmProducer(
        endpoints,
        transport,
        check=lambda endpoint, info: check_server(endpoint, info, expected, directory, max_tokens),
        patience_seconds=patience_seconds,
    )
