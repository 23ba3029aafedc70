"""The description of a vLLM server, in its answers and in a file in each of its roots.

The file shows that server and client see the same directories.
"""

import contextlib
import os
import socket
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle31.errors import UserError
from eagle31.json_files import read_json, write_json

INFO_PATH = "/v1/eagle31"  # where a server without the connector gives its info
# vLLM needs room for one token after a prompt. Without it, vLLM keeps no states of any prompt in the batch.
ROOM_TOKENS = 1


@dataclass(frozen=True)
class ServerInfo:
    """The description of one engine. A server that starts again is another engine."""

    id: str
    model: str  # the `model` argument of vLLM
    target_fingerprint: str | None  # the target of the recipe that it was started for
    aux_layer_ids: tuple[int, ...]  # empty where it captures nothing
    num_layers: int
    hidden_size: int
    dtype: str
    device: str  # cpu, cuda, ...
    vocab_size: int
    max_tokens: int  # the longest prompt that is captured, or prompt and completion together
    roots: tuple[str, ...]  # it writes in these directories only
    async_scheduling: bool = False  # whether vLLM schedules a step before it has sampled the one before

    @property
    def layer_ids(self) -> list[int]:
        """The layer ids that vLLM keeps: the aux layers' inputs and the last layer's output, ascending."""
        return sorted({*self.aux_layer_ids, self.num_layers})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(raw: dict[str, Any]) -> "ServerInfo":
        """Read what `to_json` returned.

        Raises:
            UserError: the server has another version of eagle31.
        """
        try:
            tuples = {name: tuple(raw[name]) for name in ("aux_layer_ids", "roots")}
            info = ServerInfo(**raw | tuples)
        except (KeyError, TypeError) as error:
            raise _other_version(raw) from error
        numbers = (*info.aux_layer_ids, info.num_layers, info.hidden_size, info.vocab_size, info.max_tokens)
        texts = (info.id, info.model, info.dtype, info.device, *info.roots)
        if any(type(one) is not int for one in numbers) or any(type(one) is not str for one in texts):
            raise _other_version(raw)
        return info


def _other_version(raw: object) -> UserError:
    remedy = "It is no server info of this version of eagle31; start the server again."
    return UserError("vllm.servers", str(raw)[:200], remedy)


def engine_info(
    config: Any,
    id: str,
    target_fingerprint: str | None = None,
    aux_layer_ids: tuple[int, ...] = (),
    roots: tuple[str, ...] = (),
) -> ServerInfo:
    """Return the info of an engine with this VllmConfig."""
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
        async_scheduling=bool(config.scheduler_config.async_scheduling),
    )


def info_path(root: str, server_id: str) -> Path:
    return Path(root) / f".vllm-{server_id}.json"


def write_info(info: ServerInfo) -> None:
    """Write the files of an engine that starts, in its process, and remove those of killed engines."""
    for root in info.roots:
        remove_ended(Path(root))
        content = info.to_json() | {"engine": Identity.of(os.getpid()).to_json()}
        write_json(info_path(root, info.id), content)


def remove_info(info: ServerInfo) -> None:
    """Remove the files of an engine that ends."""
    for root in info.roots:
        info_path(root, info.id).unlink(missing_ok=True)


def remove_ended(root: Path) -> None:
    """Remove the files of this machine's engines that no longer exist."""
    for path in root.glob(".vllm-*.json"):
        with contextlib.suppress(UserError, FileNotFoundError):  # of others: damaged, or removed now
            match read_json(path):
                case {"engine": engine} if (one := Identity.from_json(engine)) and one.has_ended:
                    path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Identity:
    """One process, also where its id is used again, in another container or after a restart of the machine.

    machine: this boot of the machine, and the namespace that gives processes their ids.
    process: the id and the start of the process.
    """

    machine: str
    process: str

    @staticmethod
    def of(pid: int) -> "Identity":
        return Identity(_machine(), _process(pid))

    @property
    def has_ended(self) -> bool:
        """Whether this was a process of this machine that no longer exists; False for other machines."""
        if self.machine != _machine():
            return False
        return _process(int(self.process.partition(":")[0])) != self.process

    def to_json(self) -> dict[str, str]:
        return asdict(self)

    @staticmethod
    def from_json(raw: object) -> "Identity | None":
        """Return what `to_json` has written, or None for anything else."""
        match raw:
            case {"machine": str(machine), "process": str(process)} if process.partition(":")[0].isdecimal():
                return Identity(machine, process)
        return None


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{socket.gethostname()}:{uuid.getnode()}"


def _process(pid: int) -> str:
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return f"{pid}:ended"
    # Of a process that has ended and is not reaped, the state is Z or X.
    return f"{pid}:ended" if started[0] in "ZX" else f"{pid}:{started[19]}"
