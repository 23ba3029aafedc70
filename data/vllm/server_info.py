"""What a vLLM server says about itself: in its answers, and in a file below each of its roots.

The file shows that server and client see the same directories, and says why a server has ended.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eagle31.json_files import read_json, write_json

# Behind a prompt vLLM wants room for a token, and keeps no states of a whole batch where there is none.
ROOM_TOKENS = 1
_FAILURE_LETTERS = 1000  # with the rest less than a page


@dataclass(frozen=True)
class ServerInfo:
    """One engine; a server that starts again is another one."""

    id: str
    model: str  # as vLLM was told
    target_fingerprint: str | None  # of the recipe that it was started for
    aux_layer_ids: tuple[int, ...]  # none: it captures nothing
    num_layers: int
    hidden_size: int
    dtype: str
    device: str  # cpu, cuda, ...
    vocab_size: int
    max_tokens: int  # of the longest prompt that is captured, or of prompt and answer together
    roots: tuple[str, ...]  # it writes below these only
    failure: str | None = None

    @property
    def layer_ids(self) -> list[int]:
        """What vLLM keeps: the aux layers' inputs and the last layer's output, in rising order."""
        return sorted({*self.aux_layer_ids, self.num_layers})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(raw: dict[str, Any]) -> "ServerInfo":
        tuples = {name: tuple(raw[name]) for name in ("aux_layer_ids", "roots")}
        return ServerInfo(**raw | tuples)


def engine_info(
    config: Any,
    id: str,
    target_fingerprint: str | None = None,
    aux_layer_ids: tuple[int, ...] = (),
    roots: tuple[str, ...] = (),
) -> ServerInfo:
    """Of an engine with this VllmConfig."""
    model = config.model_config
    return ServerInfo(
        id=id,
        model=model.model,
        target_fingerprint=target_fingerprint,
        aux_layer_ids=aux_layer_ids,
        num_layers=model.get_total_num_hidden_layers(),
        hidden_size=model.get_hidden_size(),
        dtype=str(model.dtype).removeprefix("torch."),
        device=config.device_config.device_type,
        vocab_size=model.get_vocab_size(),
        max_tokens=model.max_model_len - ROOM_TOKENS,
        roots=roots,
    )


def info_path(root: str, server_id: str) -> Path:
    return Path(root) / f".vllm-{server_id}.json"


def write_info(facts: ServerInfo) -> None:
    for root in facts.roots:
        write_json(info_path(root, facts.id), facts.to_json())


def write_failure(facts: ServerInfo, why: str) -> None:
    """Over what stands there, as the disk may be full: that the file has its place already."""
    text = json.dumps(replace(facts, failure=why[:_FAILURE_LETTERS]).to_json())
    for root in facts.roots:
        with info_path(root, facts.id).open("r+") as file:
            file.write(text)
            file.truncate()


def remove_info(facts: ServerInfo) -> None:
    """Of a server that ends as it should; one that failed leaves the reason."""
    for root in facts.roots:
        path = info_path(root, facts.id)
        if path.exists() and read_json(path)["failure"] is None:
            path.unlink()


def read_info(root: str, server_id: str) -> ServerInfo | None:
    path = info_path(root, server_id)
    return ServerInfo.from_json(read_json(path)) if path.exists() else None
