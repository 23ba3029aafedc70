"""A small HTTP proxy that interrupts requests as proxies in front of servers do."""

import asyncio
import hashlib
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

INTERRUPTIONS = ("502", "reset", "silent")
_PAGE = b"<html><body>The server cannot be reached.</body></html>"


class InterruptingProxy:
    """Passes requests on to a server, those that capture a sample after one interruption of each kind.

    Attributes:
        num_interrupted: how many requests were interrupted, by kind.
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = urlsplit(upstream)
        self.num_interrupted = Counter[str]()
        self._num_seen = Counter[bytes]()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(_content_length(head))
                kind = self._interruption(body)
                if kind == "reset":
                    _reset(writer)
                    return
                if kind == "silent":
                    await reader.read()  # until the client gives up
                    return
                writer.write(await self._forward(head + body) if kind is None else _error(kind))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    def _interruption(self, body: bytes) -> str | None:
        if b'"destination"' not in body:
            return None
        request = hashlib.sha256(body).digest()
        number = self._num_seen[request]
        self._num_seen[request] += 1
        if number >= len(INTERRUPTIONS):
            return None
        self.num_interrupted[INTERRUPTIONS[number]] += 1
        return INTERRUPTIONS[number]

    async def _forward(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(self._upstream.hostname, self._upstream.port)
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(_content_length(head))
        writer.close()
        return head + body


@contextmanager
def interrupting(upstream: str) -> Iterator[tuple[str, InterruptingProxy]]:
    """Run a proxy in a thread; yield its URL."""
    loop, proxy = asyncio.new_event_loop(), InterruptingProxy(upstream)
    server = loop.run_until_complete(asyncio.start_server(proxy.serve, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", proxy
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
            loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        server.close()
        loop.close()


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def _error(status: str) -> bytes:
    head = f"HTTP/1.1 {status} Error\r\nContent-Type: text/html\r\nContent-Length: {len(_PAGE)}\r\n\r\n"
    return head.encode() + _PAGE


def _reset(writer: asyncio.StreamWriter) -> None:
    linger = struct.pack("ii", 1, 0)  # close with a reset instead of the usual end
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
