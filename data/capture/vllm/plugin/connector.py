"""The connector inside vLLM, which writes the hidden states of requested prompts into a spool.

vLLM's `extract_hidden_states` method keeps the states in its cache, in blocks next to those of keys and
values, so that chunked prefill and prefix caching apply to them as well, and a prompt that vLLM preempts is
computed again. When a prompt is done, the scheduler's half of this connector keeps its blocks and names them
to the worker's half, which copies them to host memory in slices, which threads deliver. Where deliveries are
slower than copies, copies wait, blocks are kept longer, and vLLM admits fewer prompts: memory is bounded by
`PENDING_BYTES` and the cache.

What is wrong with a request or its destination never ends vLLM: the answer has the reason, or the log where
it shows only after the request was checked.

With tensor parallelism every worker has the same states, and rank 0 delivers them.
"""

from dataclasses import dataclass
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

from data.capture.transport.protocol import StateRequest
from data.capture.transport.spool import Spool
from data.capture.vllm.capture_request import PARAMS, read_request
from data.capture.vllm.plugin.cache_copy import CacheReader
from data.capture.vllm.plugin.delivery import Deliveries, Delivery, destination_spool
from data.capture.vllm.server_info import ServerInfo

# Of the host, for states that wait to be delivered.
PENDING_BYTES = 1 << 31
_SLICE_BYTES = PENDING_BYTES // 8  # at most, copied at once
_REASON_LETTERS = 1000
_STATES_LAYER = "cache_only_layers."  # the layer's name in vLLM's ExtractHiddenStatesModel


@dataclass(frozen=True)
class Computed:
    """A prompt whose states are in the cache, in blocks that are kept until they are copied."""

    request_id: str
    spool: Spool
    request: StateRequest
    block_ids: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.request.input_ids)


@dataclass
class ComputedStates(KVConnectorMetadata):
    """What the scheduler tells the workers with every step: what the steps before have computed."""

    prompts: list[Computed]


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
        # What requests that are under way ask for, or why they get nothing.
        self._asked: dict[str, tuple[Spool, StateRequest] | str] = {}
        self._done: list[Computed] = []
        self._reader: CacheReader | None = None
        self._deliveries: Deliveries | None = None
        self._samples: dict[str, tuple[Computed, Delivery]] = {}

    # The scheduler's half.

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        own = (request.kv_transfer_params or {}).get(PARAMS)
        if own is None or request.request_id in self._asked:
            return
        try:
            num_tokens = len(request.prompt_token_ids)
            if num_tokens > self._info.max_tokens:
                raise ValueError(f"{num_tokens} tokens are more than the {self._info.max_tokens} captured")
            state_request = read_request(own, request.prompt_token_ids)
            spool = destination_spool(own["destination"], self._settings["roots"])
            self._asked[request.request_id] = spool, state_request
        except Exception as error:  # Other clients use this engine, too.
            reason = f"This is no request for hidden states: {type(error).__name__}: {error}"
            self._asked[request.request_id] = reason[:_REASON_LETTERS]

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        asked = self._asked.pop(request.request_id, None)
        if asked is None:
            return False, None
        done = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        if not done or request.num_computed_tokens < request.num_prompt_tokens:
            asked = f"vLLM gave the request up: {request.status.name}"
        if isinstance(asked, str):
            return False, {PARAMS: {"error": asked}}
        self._done.append(Computed(request.request_id, *asked, block_ids[self._group]))
        return True, {PARAMS: {}}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        prompts, self._done = self._done, []
        return ComputedStates(prompts)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

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
        self._deliveries = Deliveries(len(self._info.aux_layer_ids), PENDING_BYTES)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Start copies of what the steps before have computed, which run while this one computes."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, ComputedStates)
        if self._deliveries is None or self._reader is None:
            return
        for prompt in connector_metadata.prompts:
            delivery = self._deliveries.open(prompt.spool, prompt.request)
            self._samples[prompt.request_id] = prompt, delivery
        size = self._reader.block_size
        longest = max(1, _SLICE_BYTES // self._reader.bytes_of(1)) * size
        for prompt, delivery in self._samples.values():
            while (first := delivery.num_tokens) < prompt.num_tokens:
                number = min(longest, prompt.num_tokens - first)
                if not self._deliveries.has_room(self._reader.bytes_of(number)):
                    return
                delivery.add(self._reader.copy(prompt.block_ids[first // size :], number))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose blocks are free again."""
        finished = {
            request_id
            for request_id, (prompt, delivery) in self._samples.items()
            if delivery.num_tokens == prompt.num_tokens and delivery.is_copied()
        }
        for request_id in finished:
            del self._samples[request_id]
        return finished or None, None

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


def _states_group(config: KVCacheConfig) -> int:
    """Return the index of the cache group, whose layers share their blocks, with the hidden states."""
    (index,) = (
        i
        for i, group in enumerate(config.kv_cache_groups)
        if any(name.startswith(_STATES_LAYER) for name in group.layer_names)
    )
    return index
