"""Runs inside vLLM: hands the hidden states of every prompt that asks for it to a store or a transport.

vLLM's `extract_hidden_states` method keeps them in its cache, in blocks beside those of keys and values, so
chunked prefill and prefix caching hold for them, too. When a prompt is done, the scheduler's half of this
connector checks what was asked, and keeps the blocks; the worker's half copies them to host memory and gives
them free; a thread writes. Where the thread falls behind, blocks are kept longer, and vLLM admits fewer
prompts: memory is bounded by `max_pending_gb` and the cache.

With tensor parallelism every worker holds the same states: rank 0 writes.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import RequestStatus

from data.vllm.capture_request import PARAMS, CaptureRequest, refusal, tokens_sha256
from data.vllm.plugin.cache_copy import CacheReader
from data.vllm.plugin.sink import Delivery, StateSink
from data.vllm.server_info import ServerInfo, engine_info, remove_info, write_failure, write_info

_STATES_LAYER = "cache_only_layers."  # as vLLM's ExtractHiddenStatesModel names its layer


@dataclass(frozen=True)
class PendingCopy:
    """A finished prompt whose blocks are kept until they are copied."""

    request_id: str
    order: CaptureRequest
    input_ids: list[int]
    block_ids: list[int]


@dataclass
class PendingCopies(KVConnectorMetadata):
    """From the scheduler to the workers, with every step."""

    copies: list[PendingCopy] = field(default_factory=list)


class HiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """`kv_connector_extra_config`: what `arguments.py` writes.

    Raises:
        ValueError: vLLM was started with other layers, another method or another cache dtype.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        assert vllm_config.kv_transfer_config is not None
        self._settings = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._facts = _facts(vllm_config, self._settings)
        self._group = _states_group(kv_cache_config)
        self._copies: list[PendingCopy] = []
        self._reader: CacheReader | None = None
        self._sink: StateSink | None = None
        self._copying: dict[str, Any] = {}
        if role is KVConnectorRole.SCHEDULER:
            write_info(self._facts)

    # The scheduler's half.

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        own = (request.kv_transfer_params or {}).get(PARAMS)
        if own is None:
            return False, None
        if own.get("describe"):
            return False, {PARAMS: self._facts.to_json()}
        done = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        if not done or request.num_computed_tokens < request.num_prompt_tokens:
            return False, {PARAMS: {"error": f"vLLM gave the request up: {request.status.name}"}}
        input_ids = list(request.prompt_token_ids)
        try:
            order = CaptureRequest.from_params(own)
            reason = self._refusal(order, input_ids)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"No order for hidden states: {error!r}"
        if reason is not None:
            return False, {PARAMS: {"error": reason}}
        self._copies.append(PendingCopy(request.request_id, order, input_ids, block_ids[self._group]))
        return True, {PARAMS: {"server": self._facts.id}}

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def _refusal(self, order: CaptureRequest, input_ids: list[int]) -> str | None:
        if tokens_sha256(input_ids) != order.tokens_sha256:
            return "The token ids that vLLM computed are not those that were sent."
        if len(input_ids) > self._facts.max_tokens:
            return f"{len(input_ids)} tokens are more than the {self._facts.max_tokens} that are captured."
        return refusal(order.destination, self._facts.roots, self._settings["mooncake_masters"])

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        copies, self._copies = self._copies, []
        return PendingCopies(copies)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def get_finished_count(self) -> int:
        return 1  # of the workers only rank 0 says when a copy is done

    # The workers' half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if get_tensor_model_parallel_rank() != 0:
            return
        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        (name,) = layers
        cache = kv_caches[name]
        block_size = self._kv_cache_config.kv_cache_groups[self._group].kv_cache_spec.block_size
        expected = (len(self._facts.layer_ids), block_size, self._facts.hidden_size)
        assert cache.shape[1:] == expected, f"the cache is {tuple(cache.shape)}, not [..., {expected}]"
        self._reader = CacheReader(cache)
        self._sink = StateSink(
            name=self._facts.id,
            num_aux_layers=len(self._facts.aux_layer_ids),
            max_bytes=int(self._settings.get("max_pending_gb", 2.0) * 1e9),
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Starts copies for which there is room; names the requests whose blocks are free again."""
        if self._sink is None or self._reader is None:
            return None, None
        self._fail_with_the_sink()
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PendingCopies)
        self._copies.extend(metadata.copies)
        while self._copies and self._sink.has_room(self._reader.bytes_of(len(self._copies[0].input_ids))):
            pending = self._copies.pop(0)
            copy = self._reader.copy(pending.block_ids, len(pending.input_ids))
            self._sink.submit(Delivery(pending.order, torch.tensor(pending.input_ids), copy))
            self._copying[pending.request_id] = copy
        finished = {request_id for request_id, copy in self._copying.items() if copy.finished()}
        for request_id in finished:
            del self._copying[request_id]
        return finished or None, None

    def _fail_with_the_sink(self) -> None:
        """vLLM ends with it: a server that computes what it cannot write would only waste its work."""
        assert self._sink is not None
        try:
            self._sink.check()
        except BaseException as error:
            write_failure(self._facts, f"{type(error).__name__}: {error}")
            raise

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def shutdown(self) -> None:
        if self._sink is not None:
            sink, self._sink = self._sink, None
            sink.close()
        if self.role is KVConnectorRole.SCHEDULER:
            remove_info(self._facts)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return "LBNHC"  # a token's states of all layers lie together


def _facts(config: VllmConfig, settings: dict[str, Any]) -> ServerInfo:
    """Of this engine.

    Raises:
        ValueError: it would not give the states that are asked for.
    """
    assert config.kv_transfer_config is not None
    speculative, model = config.speculative_config, config.model_config
    if speculative is None or not speculative.uses_extract_hidden_states():
        raise ValueError(
            "speculative_config needs method=extract_hidden_states: scripts/serve_target sets it."
        )
    num_layers = model.get_total_num_hidden_layers()
    aux = tuple(settings["aux_layer_ids"])
    kept = list(speculative.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids)
    if kept != sorted({*aux, num_layers}):
        raise ValueError(
            f"aux_layer_ids={list(aux)} need eagle_aux_hidden_state_layer_ids="
            f"{sorted({*aux, num_layers})}, which is {kept}."
        )
    if config.cache_config.cache_dtype != "auto":
        raise ValueError("kv_cache_dtype must be auto: the hidden states' cache would have it, too.")
    if config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError("pipeline_parallel_size must be 1: hidden states are on the last stage only.")
    return engine_info(
        config,
        config.kv_transfer_config.engine_id,
        settings.get("target_fingerprint"),
        aux,
        tuple(str(Path(root).resolve()) for root in settings["roots"]),
    )


def _states_group(config: KVCacheConfig) -> int:
    """Of the cache's groups of layers, which share their blocks, the one that holds the hidden states."""
    names = [group.layer_names for group in config.kv_cache_groups]
    (found,) = (i for i, own in enumerate(names) if any(name.startswith(_STATES_LAYER) for name in own))
    return found
