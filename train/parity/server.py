"""A running vLLM server: completions of token ids, and its counters before and after them."""

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle31.decoding.acceptance import AcceptanceStats
from eagle31.decoding.speculative import Decoded
from eagle31.errors import UserError
from train.parity.compare import Difference, compare_completions
from train.serving.drafts import placed_drafts

TOLERANCE = {
    True: 0.01,
    False: 0.05,
}  # relative, of the acceptance length; by whether the server runs in float32
_SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_PREFIX = "vllm:spec_decode_num_"
_TIMEOUT_SECONDS = 600
_SETTLE_SECONDS = 10


@dataclass(frozen=True)
class ServerCounters:
    """Counts since the server started, over all its engines."""

    num_requests: int  # finished
    num_drafts: int
    accepted_per_position: tuple[int, ...]  # one entry per position of a draft; empty without a drafter

    def __sub__(self, before: "ServerCounters") -> "ServerCounters":
        pairs = zip(self.accepted_per_position, before.accepted_per_position, strict=True)
        return ServerCounters(
            self.num_requests - before.num_requests,
            self.num_drafts - before.num_drafts,
            tuple(after - earlier for after, earlier in pairs),
        )


def parse_counters(metrics: str) -> ServerCounters:
    """Parse `/metrics`, which is in Prometheus' text format."""
    num_requests = num_drafts = 0.0
    per_position: dict[int, float] = {}
    for line in metrics.splitlines():
        sample = _SAMPLE.match(line)
        if sample is None:
            continue
        name, value = sample["name"], float(sample["value"])
        if name == "vllm:request_success_total":
            num_requests += value
        elif name == f"{_PREFIX}drafts_total":
            num_drafts += value
        elif name == f"{_PREFIX}accepted_tokens_per_pos_total":
            position = int(dict(_LABEL.findall(sample["labels"]))["position"])
            per_position[position] = per_position.get(position, 0.0) + value
    accepted = tuple(int(per_position[position]) for position in sorted(per_position))
    return ServerCounters(int(num_requests), int(num_drafts), accepted)


class Server:
    """An OpenAI-compatible vLLM server."""

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise UserError("--url", url, "Give the server's address, such as http://127.0.0.1:8000.")
        self.url = url.rstrip("/").removesuffix("/v1")

    def model(self) -> str:
        """Return the name of the served model."""
        return json.loads(self._request("/v1/models"))["data"][0]["id"]

    def counters(self) -> ServerCounters:
        return parse_counters(self._request("/metrics"))

    def complete(self, model: str, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return exactly `num_tokens` greedy tokens.

        Raises:
            UserError: the server refuses the request, or does not return token ids.
        """
        # The server takes missing settings from the target's generation_config.json.
        greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            **greedy,
        }
        choice = json.loads(self._request("/v1/completions", body))["choices"][0]
        if not choice.get("token_ids"):
            raise UserError("--url", self.url, "It returns no token ids; use vLLM 0.11 or newer.")
        return choice["token_ids"]

    def settled_counters(self, num_requests: int) -> ServerCounters:
        """Return the counters once they include `num_requests`; a request counts after its response."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        counters = self.counters()
        while counters.num_requests < num_requests and time.monotonic() < deadline:
            time.sleep(0.2)
            counters = self.counters()
        return counters

    def _request(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
                return response.read().decode()
        except urllib.error.HTTPError as error:
            reason = error.read().decode(errors="replace")[:500]
            raise UserError("--url", self.url + path, f"The server says {error.code}: {reason}") from error
        except OSError as error:
            reason = str(getattr(error, "reason", error))
            raise UserError("--url", self.url + path, f"No server answers there ({reason}).") from error


@dataclass(frozen=True)
class ServerRun:
    """The server's completions, and the increase of its counters."""

    model: str
    completions: list[list[int]]
    counters: ServerCounters


def run_on_server(server: Server, prompts: Sequence[Sequence[int]], k: int, num_tokens: int) -> ServerRun:
    """Complete one prompt after the other with `num_tokens` tokens each.

    Raises:
        UserError: the server has no drafter, or its drafts have another length.
    """
    model, before = server.model(), server.counters()
    if not before.accepted_per_position:
        remedy = "The server drafts nothing; start it with --speculative-config."
        raise UserError("--url", server.url, remedy)
    if len(before.accepted_per_position) != k:
        remedy = f"The server drafts {len(before.accepted_per_position)} tokens; give this number as -k."
        raise UserError("-k", k, remedy)
    completions = [server.complete(model, prompt, num_tokens) for prompt in prompts]
    after = server.settled_counters(before.num_requests + len(prompts))
    return ServerRun(model, completions, after - before)


@dataclass(frozen=True)
class ServerComparison:
    """Counts and completions of both sides; a server does not show single drafts."""

    ours: AcceptanceStats
    vllm: AcceptanceStats
    completions: list[Difference]
    num_completions: int
    num_other_requests: int
    exact: bool  # the server is said to run in float32

    @property
    def failures(self) -> list[str]:
        """The reasons why the server differs from the trained drafter; empty if it does not."""
        if self.num_other_requests:
            return [
                f"the server answered {self.num_other_requests} other requests at the same time, which its "
                "counters include"
            ]
        if not self.vllm.num_drafts:
            return ["vLLM drafted nothing"]
        found = []
        gap = abs(self.vllm.acceptance_length / self.ours.acceptance_length - 1)
        if gap > TOLERANCE[self.exact]:
            found.append(f"acceptance lengths differ by {gap:.1%}")
        different = [one for one in self.completions if not one.near_tie]
        if not different and not self.completions and self.vllm.num_drafts > self.ours.num_drafts * 1.05:
            found.append("the server made more drafts for the same tokens: other traffic, or another drafter")
        if self.exact and different:
            found.append(f"{len(different)} completions differ from the evaluator's")
        return found

    @property
    def passed(self) -> bool:
        return not self.failures


def compare_with_server(
    reference: Sequence[Decoded], run: ServerRun, k: int, num_tokens: int, *, exact: bool
) -> ServerComparison:
    """Compare the server's counters and completions with the evaluator's.

    Args:
        reference: decoded k + 1 tokens past `num_tokens` and without stop tokens, because the server also
            counts tokens that it accepts past the end.
    """
    num_accepted = [
        draft.num_accepted for one in reference for draft in placed_drafts(one) if draft.position < num_tokens
    ]
    counters = run.counters
    return ServerComparison(
        ours=AcceptanceStats.from_lengths(k, num_accepted),
        vllm=AcceptanceStats(k, counters.num_drafts, counters.accepted_per_position),
        completions=compare_completions(
            reference, [one.token_ids[:num_tokens] for one in reference], run.completions
        ),
        num_completions=len(reference),
        num_other_requests=max(0, counters.num_requests - len(run.completions)),
        exact=exact,
    )
