"""The connector inside vLLM, which hands the hidden states of requested prompts to a transport.

vLLM's `extract_hidden_states` method keeps the states in its cache, in blocks next to those of keys and
values, so that chunked prefill and prefix caching apply to them as well. When a prompt is done, the
scheduler's half of this connector checks the request and keeps the blocks. The worker's half copies the
blocks to host memory and frees them, and threads deliver the copies. Where those are slower, blocks are kept
longer, and vLLM admits fewer prompts: memory is bounded by `PENDING_BYTES` and the cache.

What is wrong with a request or its destination never ends vLLM: the answer has the reason, or the log where
it shows only after the answer.

With tensor parallelism every worker has the same states, and rank 0 delivers them.
"""

from dataclasses import dataclass, field, replace
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

from data.capture.vllm.capture_request import PARAMS, CaptureRequest, tokens_sha256
from data.capture.vllm.plugin.cache_copy import CacheReader
from data.capture.vllm.plugin.delivery import Accepted, Deliveries, resolved
from data.capture.vllm.server_info import ServerInfo

# Of the host, for states that wait to be delivered; more where one prompt takes more.
PENDING_BYTES = 1 << 31
_REASON_LETTERS = 1000
_STATES_LAYER = "cache_only_layers."  # the layer's name in vLLM's ExtractHiddenStatesModel


@dataclass(frozen=True)
class PendingCopy:
    """A finished prompt whose blocks are kept until they are copied."""

    request_id: str
    capture: CaptureRequest
    input_ids: list[int]
    block_ids: list[int]


@dataclass
class PendingCopies(KVConnectorMetadata):
    """The copies that the scheduler hands to the workers with every step."""

    copies: list[PendingCopy] = field(default_factory=list)


class HiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's connector for hidden states. `arguments.py` writes its `kv_connector_extra_config`.

    Raises:
        ValueError: vLLM was started with other layers, or with another method.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        assert vllm_config.kv_transfer_config is not None
        self._settings = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._info = ServerInfo.of(vllm_config)
        self._group = _states_group(kv_cache_config)
        self._accepted = _accepted(self._info, self._settings)
        self._copies: list[PendingCopy] = []
        self._reader: CacheReader | None = None
        self._deliveries: Deliveries | None = None
        self._copying: dict[str, Any] = {}

    # The scheduler's half.

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        own = (request.kv_transfer_params or {}).get(PARAMS)
        if own is None:
            return False, None
        try:
            return self._answer(own, request, block_ids)
        except Exception as error:  # Other clients use this engine, too.
            reason = f"This is no request for hidden states: {type(error).__name__}: {error}"
            return False, {PARAMS: {"error": reason[:_REASON_LETTERS]}}

    def _answer(
        self, own: dict[str, Any], request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any]]:
        done = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        if not done or request.num_computed_tokens < request.num_prompt_tokens:
            return False, {PARAMS: {"error": f"vLLM gave the request up: {request.status.name}"}}
        input_ids = list(request.prompt_token_ids)
        capture = CaptureRequest.from_params(own, len(input_ids))
        if tokens_sha256(input_ids) != capture.tokens_sha256:
            return False, {
                PARAMS: {"error": "The token ids that vLLM computed are not those that were sent."}
            }
        if len(input_ids) > self._info.max_tokens:
            longest = f"the {self._info.max_tokens} that are captured"
            return False, {PARAMS: {"error": f"{len(input_ids)} tokens are more than {longest}."}}
        reason = self._accepted.refusal(capture.destination)
        if reason is not None:
            return False, {PARAMS: {"error": reason}}
        capture = replace(capture, destination=resolved(capture.destination))
        self._copies.append(PendingCopy(request.request_id, capture, input_ids, block_ids[self._group]))
        return True, {PARAMS: {}}

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        copies, self._copies = self._copies, []
        return PendingCopies(copies)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def get_finished_count(self) -> int:
        return 1  # only rank 0 reports finished copies

    # The workers' half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if get_tensor_model_parallel_rank() != 0:
            return
        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        (name,) = layers
        cache = kv_caches[name]
        block_size = self._kv_cache_config.kv_cache_groups[self._group].kv_cache_spec.block_size
        expected = (len(self._info.layer_ids), block_size, self._info.hidden_size)
        assert cache.shape[1:] == expected, f"the cache is {tuple(cache.shape)}, not [..., {expected}]"
        self._reader = CacheReader(cache)
        limit = max(PENDING_BYTES, self._reader.bytes_of(self._info.max_tokens))
        self._deliveries = Deliveries(len(self._info.aux_layer_ids), limit)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Start copies for which there is room, and return the requests whose blocks are free again."""
        if self._deliveries is None or self._reader is None:
            return None, None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PendingCopies)
        self._copies.extend(metadata.copies)
        self._start_copies(self._deliveries, self._reader)
        finished = {request_id for request_id, copy in self._copying.items() if copy.finished()}
        for request_id in finished:
            del self._copying[request_id]
        return finished or None, None

    def _start_copies(self, deliveries: Deliveries, reader: CacheReader) -> None:
        """Start the copies for which there is room."""
        waiting: list[PendingCopy] = []
        for pending in self._copies:
            num_tokens = len(pending.input_ids)
            if not deliveries.has_room(pending.capture.destination, reader.bytes_of(num_tokens)):
                waiting.append(pending)
                continue
            copy = reader.copy(pending.block_ids, num_tokens)
            deliveries.submit(pending.capture, torch.tensor(pending.input_ids), copy)
            self._copying[pending.request_id] = copy
        self._copies = waiting

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def shutdown(self) -> None:
        if self._deliveries is not None:
            deliveries, self._deliveries = self._deliveries, None
            deliveries.close()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return "LBNHC"  # the states of all layers of a token are contiguous


def _accepted(info: ServerInfo, settings: dict[str, Any]) -> Accepted:
    return Accepted(
        roots=settings["roots"],
        mooncake_masters=settings["mooncake_masters"],
        num_aux_layers=len(info.aux_layer_ids),
        hidden_size=info.hidden_size,
    )


def _states_group(config: KVCacheConfig) -> int:
    """Return the index of the cache group, whose layers share their blocks, with the hidden states."""
    (index,) = (
        i
        for i, group in enumerate(config.kv_cache_groups)
        if any(name.startswith(_STATES_LAYER) for name in group.layer_names)
    )
    return index
