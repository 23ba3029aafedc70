"""A server on loopback with the part of the Hub's API that uploads a model.

Source: the requests of huggingface_hub's client, and https://huggingface.co/docs/hub/api.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "hf_ThisIsAToken"
SMALL = 4096  # larger files are uploaded by LFS


@dataclass
class Hub:
    """The server's state; each commit of a repository has all of its files."""

    url: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    commits: dict[str, list[tuple[str, dict[str, bytes]]]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    refuses_objects: bool = False
    # Called with "request" or "answer", and the path, before a request is handled and before it is answered.
    observe: Callable[[str, str], None] = lambda moment, path: None

    def files(self, repo: str) -> dict[str, bytes]:
        commits = self.commits.get(repo)
        return commits[-1][1] if commits else {}

    def oid(self, content: bytes) -> str:
        """Return git's name of a file's content; for a large file, its sha256."""
        if len(content) > SMALL:
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, {"sha": "0" * 40, "id": self.path.removeprefix("/api/models/")})

        def do_PUT(self) -> None:
            hub.observe("request", self.path)
            content = self._body()
            oid = self.path.rpartition("/")[2]
            if hub.refuses_objects or hashlib.sha256(content).hexdigest() != oid:
                return self._answer(403, {"error": "storage quota exceeded"})
            hub.objects[oid] = content
            return self._answer(200, {})

        def do_POST(self) -> None:
            hub.requests.append(self.path)
            hub.observe("request", self.path)
            body = self._body()
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                return self._answer(401, {"error": "Invalid username or password."})
            if self.path == "/api/repos/create":
                return self._create(json.loads(body))
            if self.path == "/api/validate-yaml":
                return self._answer(200, {"errors": [], "warnings": []})
            if self.path.endswith("/info/lfs/objects/batch"):
                return self._batch(json.loads(body))
            repo, _, what = self.path.removeprefix("/api/models/").rpartition("/main")[0].rpartition("/")
            handle = {"preupload": self._preupload, "commit": self._commit}[what]
            return handle(repo, body)

        def _create(self, body: dict[str, Any]) -> None:
            repo = "/".join(filter(None, (body.get("organization"), body["name"])))
            if repo in hub.private:
                return self._answer(409, {"error": "exists", "url": f"{hub.url}/{repo}"})
            hub.private[repo] = body.get("private", False) or body.get("visibility") == "private"
            return self._answer(200, {"url": f"{hub.url}/{repo}"})

        def _preupload(self, repo: str, body: bytes) -> None:
            present = hub.files(repo)
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["size"] > SMALL else "regular",
                    "shouldIgnore": False,
                    "oid": hub.oid(present[file["path"]]) if file["path"] in present else None,
                }
                for file in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})

        def _batch(self, body: dict[str, Any]) -> None:
            objects = [
                {**one, "actions": {"upload": {"href": f"{hub.url}/objects/{one['oid']}"}}}
                if one["oid"] not in hub.objects
                else one
                for one in body["objects"]
            ]
            self._answer(200, {"transfer": "basic", "objects": objects})

        def _commit(self, repo: str, body: bytes) -> None:
            files, message = dict(hub.files(repo)), ""
            for line in body.decode().splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "header":
                    message = value["summary"]
                elif entry["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    files[value["path"]] = hub.objects[value["oid"]]
            hub.commits.setdefault(repo, []).append((message, files))
            oid = f"{len(hub.commits[repo]):040d}"
            self._answer(200, {"commitUrl": f"{hub.url}/{repo}/commit/{oid}", "commitOid": oid})

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                parts = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def _answer(self, status: int, content: dict[str, Any]) -> None:
            hub.observe("answer", self.path)
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:
            """A client that was killed is no error."""

    with Server(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        Thread(target=server.serve_forever, daemon=True).start()
        yield hub
        server.shutdown()
