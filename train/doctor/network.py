"""Ports of this machine, and the vLLM servers that the recipe names."""

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from data.vllm.endpoint import Refused, Unavailable, describe
from data.vllm.environment import KEY_VARIABLE
from data.vllm.server import VllmServer
from data.vllm.server_info import ServerInfo
from eagle31.errors import UserError
from train.doctor.check import Check, Status, judged, ok

ANSWER_SECONDS = 10.0
_LOOPBACK = "127.0.0.1"
_MASTER_PORT = "29500"  # torchrun's default, on several nodes


def port_check(name: str, field: str, port: int, host: str = _LOOPBACK) -> Check:
    """Return whether a port of this machine is free, after listening on it for a moment.

    Args:
        field: the setting that names the port.
    """
    reason = port_obstacle(host, port)
    remedy = (
        f"Nothing can listen on {host}:{port} ({reason}); give another port, or end the program that has it."
    )
    return judged(name, reason is None, reason or "free", f"{host}:{port}", remedy, field=field, value=port)


def port_obstacle(host: str, port: int) -> str | None:
    """Return why no server could listen on a port; None if one can."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            probe.bind((host, port))
            probe.listen(1)
    except (OSError, OverflowError) as error:
        return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return None


def master_port_check(environment: Mapping[str, str], num_nodes: int) -> Check:
    """Return whether torchrun's rendezvous can use its port; on one node torchrun chooses a free one."""
    named = environment.get("PET_MASTER_PORT")
    if named is None and num_nodes == 1:
        return ok("torchrun's port", "chosen by torchrun", "a free one")
    return port_check("torchrun's port", "--master-port", int(named or _MASTER_PORT), "0.0.0.0")


def servers_checks(
    urls: Sequence[str], target: str, aux_layer_ids: Sequence[int] | None, seconds: float = ANSWER_SECONDS
) -> list[Check]:
    """Return whether the servers answer, accept this process's key and run the target.

    Args:
        aux_layer_ids: those that the drafter reads; None: the servers capture nothing for this run.
        seconds: the limit for each.
    """

    async def ask(url: str) -> Check:
        server = None
        try:
            server = VllmServer(url, 1)
            info = await asyncio.wait_for(describe(server), seconds)
        except TimeoutError:
            return _silent(url, f"no answer within {seconds:.0f} s")
        except Unavailable as error:
            return _silent(url, f"no answer ({_cause(error)})")
        except Refused as error:
            return Check(_name(url), Status.lacking, "refuses", target, str(error), "vllm.servers", url)
        except UserError as error:
            found = "another key" if KEY_VARIABLE in error.remedy else "no server of eagle31"
            return Check(_name(url), Status.lacking, found, target, error.remedy, "vllm.servers", url)
        finally:
            if server is not None:
                await server.close()
        return server_check(url, info, target, aux_layer_ids)

    async def ask_all() -> list[Check]:
        return list(await asyncio.gather(*map(ask, urls)))

    return asyncio.run(ask_all())


def server_check(url: str, info: ServerInfo, target: str, aux_layer_ids: Sequence[int] | None) -> Check:
    """Return whether a server that has answered runs the target with these aux layer ids."""
    needed = target if aux_layer_ids is None else f"{target}, layers {_listed(aux_layer_ids)}"
    found = f"{info.model}, layers {_listed(info.aux_layer_ids)}"
    remedy = "Start it with scripts/serve_target and the recipe and settings of this run."
    if aux_layer_ids is not None and tuple(info.aux_layer_ids) != tuple(aux_layer_ids):
        return Check(_name(url), Status.lacking, found, needed, remedy, "vllm.servers", url)
    # The run compares the weights, which may be elsewhere under another name.
    return judged(_name(url), info.model == target, found, needed, remedy, otherwise=Status.warning)


def _silent(url: str, found: str) -> Check:
    remedy = (
        "Start it with scripts/serve_target, or correct vllm.servers; firewalls and proxies may be between."
    )
    return Check(_name(url), Status.lacking, found, "an answer", remedy, "vllm.servers", url)


def _cause(error: BaseException) -> str:
    """Return the operating system's reason, which clients wrap in several errors of theirs."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, socket.gaierror):
            return cause.strerror or str(cause)
        if isinstance(cause, OSError) and cause.errno:
            return os.strerror(cause.errno)
        cause = cause.__cause__ or cause.__context__
    return str(error)


def _name(url: str) -> str:
    return f"server {urlsplit(url).netloc or url}"


def _listed(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))
