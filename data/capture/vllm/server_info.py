"""The description of a vLLM server, which it gives at `INFO_PATH`."""

from dataclasses import asdict, dataclass
from typing import Any

from data.capture.dispatch import EngineInfo
from eagle31.errors import UserError

INFO_PATH = "/v1/eagle31"
# vLLM needs room for one token after a prompt. Without it, vLLM keeps no states of any prompt in the batch.
ROOM_TOKENS = 1


@dataclass(frozen=True)
class ServerInfo(EngineInfo):
    """The description of one server."""

    model: str  # the `model` argument of vLLM
    target_fingerprint: str | None  # the target of the recipe that it was started for
    aux_layer_ids: tuple[int, ...]  # empty where it captures nothing
    num_layers: int
    hidden_size: int
    dtype: str
    device: str  # cpu, cuda, ...
    cache_tokens: int | None  # of all engines together; None before their caches exist
    async_scheduling: bool  # whether vLLM schedules a step before it has sampled the one before

    @property
    def layer_ids(self) -> list[int]:
        """The layer ids that vLLM keeps: the aux layers' inputs and the last layer's output, ascending."""
        return sorted({*self.aux_layer_ids, self.num_layers})

    @staticmethod
    def of(config: Any) -> "ServerInfo":
        """Return the info of a server with this VllmConfig."""
        model, transfer = config.model_config, config.kv_transfer_config
        cache_tokens = config.cache_config.kv_cache_size_tokens
        settings = {} if transfer is None else transfer.kv_connector_extra_config
        return ServerInfo(
            model=model.model,
            target_fingerprint=settings.get("target_fingerprint"),
            aux_layer_ids=tuple(settings.get("aux_layer_ids", ())),
            num_layers=model.get_total_num_hidden_layers(),
            hidden_size=model.get_hidden_size(),
            dtype=str(model.dtype).removeprefix("torch."),
            device=config.device_config.device_type,
            vocab_size=model.get_vocab_size(),
            max_tokens=model.max_model_len - ROOM_TOKENS,
            cache_tokens=cache_tokens and cache_tokens * config.parallel_config.data_parallel_size,
            async_scheduling=bool(config.scheduler_config.async_scheduling),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(raw: Any) -> "ServerInfo":
        """Read what `to_json` returned.

        Raises:
            UserError: the server has another version of eagle31.
        """
        try:
            return ServerInfo(**raw | {"aux_layer_ids": tuple(raw["aux_layer_ids"])})
        except (KeyError, TypeError) as error:
            remedy = "It is no server info of this version of eagle31; start the server again."
            raise UserError("vllm.servers", str(raw)[:200], remedy) from error
