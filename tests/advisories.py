"""Known vulnerabilities of packages, from the database of open-source vulnerabilities (OSV)."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import httpx


@dataclass(frozen=True)
class Advisories:
    url: str = "https://api.osv.dev/v1/querybatch"

    def query(self, versions: Mapping[str, str]) -> dict[str, list[str]]:
        """Return the names of the advisories for each release that has some.

        Raises:
            OSError: the database does not answer, or not with what it documents.
        """
        names = list(versions)
        packages = [{"name": name, "ecosystem": "PyPI"} for name in names]
        queries = [{"package": one, "version": versions[one["name"]]} for one in packages]
        try:
            answer = httpx.post(self.url, json={"queries": queries}, timeout=5)
            results = answer.raise_for_status().json()["results"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise OSError(f"{self.url}: {error}") from error
        found = {}
        for name, result in zip(names, results, strict=True):
            if result.get("vulns"):
                found[f"{name} {versions[name]}"] = [one["id"] for one in result["vulns"]]
        return found


@contextmanager
def advisory_server(known: Mapping[tuple[str, str], list[str]]) -> Iterator[str]:
    """Serve these advisories in OSV's format, and yield the address."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            queries = json.loads(self.rfile.read(length))["queries"]
            results: list[dict[str, Any]] = []
            for one in queries:
                ids = known.get((one["package"]["name"], one["version"]), [])
                results.append({"vulns": [{"id": name} for name in ids]} if ids else {})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"results": results}).encode())

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/query"
        server.shutdown()
