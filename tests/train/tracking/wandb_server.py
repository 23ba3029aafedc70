"""A server that records what W&B's client sends, and answers as far as a run needs it. It checks no key."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = "someone"


@dataclass
class Recorded:
    """What the server has of each W&B run.

    Attributes:
        rows: the rows of the history in the order of their offsets, as W&B's server keeps them.
        gaps: by how much the offset of each part of a history differed from the end of what was there.
    """

    url: str = ""
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    gaps: list[int] = field(default_factory=list)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        query, variables = request["query"], request.get("variables", {})
        name = variables.get("name")
        if "RunResumeStatus" in query:
            entity = {"id": "e", "name": ENTITY}
            return {"model": {"id": "p", "name": "p", "entity": entity, "bucket": self._status(name)}}
        if "UpsertBucket" in query:
            self.rows.setdefault(name, [])
            project = {"id": "p", "name": variables["project"], "entity": {"id": "e", "name": ENTITY}}
            bucket = {"id": "b", "name": name, "displayName": name, "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "CreateRunFiles" in query:
            files = [{"name": one, "uploadUrl": f"{self.url}/upload"} for one in variables["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        return {"serverInfo": {"features": []}}

    def stream(self, name: str, request: dict[str, Any]) -> None:
        part = (request.get("files") or {}).get("wandb-history.jsonl")
        if part is not None:
            self.gaps.append(part["offset"] - len(self.rows[name]))
            self.rows[name] += map(json.loads, part["content"])

    def _status(self, name: str) -> dict[str, Any] | None:
        if name not in self.rows:
            return None
        status = {"summaryMetrics": "{}", "config": "{}", "wandbConfig": '{"t": 1}'}  # it has begun
        tail = json.dumps([json.dumps(row) for row in self.rows[name][-1:]])
        counts = {"logLineCount": 0, "historyLineCount": len(self.rows[name]), "eventsLineCount": 0}
        return {"id": "b", "name": name, "historyTail": tail, "eventsTail": "[]"} | status | counts


@contextmanager
def recording_server() -> Iterator[Recorded]:
    """Run the server at a port of loopback."""
    recorded, lock = Recorded(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle(self) -> None:
            with suppress(ConnectionError):  # of a client that was killed
                super().handle()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            answer: dict[str, Any] = {}
            with lock:
                if self.path == "/graphql":
                    answer = {"data": recorded.answer(json.loads(body))}
                elif self.path.endswith("/file_stream"):
                    recorded.stream(self.path.split("/")[-2], json.loads(body))
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_PUT = do_POST

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        recorded.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield recorded
        finally:
            server.shutdown()
            thread.join()
