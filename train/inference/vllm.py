"""The recipe's vLLM: which engine it takes, where prompts are sent, and capture through it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.capture.offline import StoreSpec
from data.transport.spool import MEMORY
from data.vllm.arguments import CaptureEngine
from data.vllm.client import ExpectedStates, capture_through_vllm
from data.vllm.endpoint import Endpoint
from data.vllm.engine import LocalEngine
from data.vllm.server import VllmServer
from train.config.capture import CaptureMode, TransportKind
from train.context import RunContext


def capture_engine(context: RunContext) -> CaptureEngine:
    """An engine that captures and writes everything that the run needs, and where it does."""
    config, parts = context.config, context.parts
    capture, regenerate = config.capture, config.data.regenerate
    written = config.data.max_tokens + regenerate.max_new_tokens if regenerate.enabled else 0
    roots = [str(context.output_dir.resolve())]
    if capture.mode is CaptureMode.online and capture.transport is TransportKind.spool:
        roots.append(str(Path(capture.spool_dir or MEMORY).resolve()))
    online_mooncake = capture.mode is CaptureMode.online and capture.transport is TransportKind.mooncake
    return CaptureEngine(
        target=context.spec.checkpoint.path,
        revision=context.spec.revision,
        dtype=str(parts.embed_tokens.dtype).removeprefix("torch."),
        trust_remote_code=context.spec.trust_remote_code,
        target_fingerprint=parts.fingerprint,
        aux_layer_ids=context.aux_layer_ids,
        num_layers=parts.num_layers,
        # A sample fits a row, and so does a held-out prompt with its answer; an answer is cut afterwards.
        max_tokens=max(config.train.row_tokens, written),
        roots=roots,
        mla=getattr(parts.config.get_text_config(), "kv_lora_rank", None) is not None,
        mooncake_masters=[capture.mooncake.master] if online_mooncake else [],
        extra=config.vllm.engine_args,
    )


def expected_states(context: RunContext) -> ExpectedStates:
    """What every server has to give."""
    parts = context.parts
    return ExpectedStates(
        target=context.spec.checkpoint.path,
        target_fingerprint=parts.fingerprint,
        aux_layer_ids=context.aux_layer_ids,
        hidden_size=parts.hidden_size,
        num_layers=parts.num_layers,
        dtype=parts.embed_tokens.dtype,
    )


def servers(context: RunContext) -> list[Endpoint]:
    """The recipe's."""
    vllm = context.config.vllm
    return [VllmServer(url, vllm.max_concurrency) for url in vllm.servers]


def capture_endpoints(context: RunContext) -> list[Endpoint]:
    """The recipe's servers, or an engine of the run's own; starts nothing yet."""
    own = LocalEngine.of(capture_engine(context), context.output_dir / f"vllm-{context.world.rank}.log")
    return servers(context) or [own]


def capture_by_vllm(
    context: RunContext, stores: Sequence[StoreSpec], manifest_fields: Mapping[str, Any]
) -> None:
    """Rank 0 sends the prompts, vLLM writes; the others wait for the end."""
    capture, world = context.config.capture, context.world
    capture_through_vllm(
        stores,
        expected_states(context),
        capture_endpoints(context) if world.is_main else (),
        shard_tokens=capture.shard_tokens,
        manifest_fields=manifest_fields,
        rank=world.rank,
        progress=world.is_main,
    )
