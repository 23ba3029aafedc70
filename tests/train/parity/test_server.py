import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from eagle31.decoding.speculative import Decoded
from eagle31.errors import UserError
from train.parity.server import (
    Server,
    ServerCounters,
    ServerRun,
    compare_with_server,
    parse_counters,
    run_on_server,
)

LABELS = 'engine="%d",model_name="a \\"b\\", position=\\"7\\" {c}"'


def metrics(num_requests: int, num_drafts: int, accepted: list[int], engines: int = 1) -> str:
    """Return metrics as vLLM 0.32 writes them, with separate lines for each engine."""
    lines = ["# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts."]
    for engine in range(engines):
        labels = LABELS % engine
        lines += [
            f"vllm:spec_decode_num_drafts_total{{{labels}}} {num_drafts:.1f}",
            f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.7952432865152786e+09",
            f'vllm:request_success_total{{{labels},finished_reason="length"}} {num_requests:.1f}',
            f'vllm:request_success_total{{{labels},finished_reason="stop"}} 2.0',
            f'vllm:request_success_created{{{labels},finished_reason="stop"}} 1.79e+09',
        ]
        for position, count in enumerate(accepted):
            name = f'accepted_tokens_per_pos_total{{{labels},position="{position}"}}'
            lines.append(f"vllm:spec_decode_num_{name} {count:e}")
    return "\n".join([*lines, "process_cpu_seconds_total 12.5", "python_info NaN", ""])


def test_counters_are_read_from_prometheus_text() -> None:
    assert parse_counters(metrics(5, 40, [20, 9, 3])) == ServerCounters(7, 40, (20, 9, 3))
    assert parse_counters(metrics(5, 40, [20, 9], engines=2)) == ServerCounters(14, 80, (40, 18))
    assert parse_counters("") == ServerCounters(0, 0, ())


class FakeVLLM(BaseHTTPRequestHandler):
    """Completes every prompt with 7, 8, 9, ...; counts three drafts and one accepted token per completion."""

    num_requests = 0
    requests: list[dict] = []  # noqa: RUF012
    accepted_positions = 2

    def do_GET(self) -> None:
        done = type(self).num_requests
        if self.path == "/v1/models":
            self._answer(json.dumps({"data": [{"id": "served"}]}))
        else:
            accepted = [done] + [0] * (self.accepted_positions - 1) if self.accepted_positions else []
            self._answer(metrics(done, 3 * done, accepted))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).num_requests += 1
        self.requests.append(body)
        self._answer(json.dumps({"choices": [{"token_ids": list(range(7, 7 + body["max_tokens"]))}]}))

    def log_message(self, *arguments: object) -> None:
        pass

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def server() -> Iterator[Server]:
    FakeVLLM.num_requests, FakeVLLM.accepted_positions = 10, 2
    FakeVLLM.requests.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeVLLM) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield Server(f"http://127.0.0.1:{http.server_port}/v1/")
        http.shutdown()
        thread.join()


def test_requests_are_greedy_and_by_token_ids(server: Server) -> None:
    run = run_on_server(server, [[1, 2], [3]], k=2, num_tokens=4)
    assert run == ServerRun("served", [[7, 8, 9, 10]] * 2, ServerCounters(2, 6, (2, 0)))
    body = FakeVLLM.requests[1]
    assert (body["prompt"], body["max_tokens"], body["temperature"]) == ([3], 4, 0.0)
    assert body["ignore_eos"]
    assert body["repetition_penalty"] == 1.0


def test_servers_that_cannot_be_compared_are_refused(server: Server) -> None:
    with pytest.raises(UserError, match=r"-k=4: The server drafts 2 tokens"):
        run_on_server(server, [[1]], k=4, num_tokens=4)
    FakeVLLM.accepted_positions = 0
    with pytest.raises(UserError, match="drafts nothing"):
        run_on_server(server, [[1]], k=4, num_tokens=4)
    assert FakeVLLM.requests == []
    with pytest.raises(UserError, match=r"Give the server's address"):
        Server("127.0.0.1:8000")
    with pytest.raises(UserError, match="No server answers"):
        Server("http://127.0.0.1:9").counters()  # the discard port


# Twelve tokens were decoded, so that the whole draft at position 7 is known; eight were requested.
REFERENCE = Decoded(
    token_ids=list(range(12)),
    accepted=[1, 3, 2, 0],
    num_target_forwards=5,
    seconds=1.0,
    margins=[1.0] * 12,
    drafts=[[0] * 3] * 4,  # at 1, 3, 7 and 10
    draft_margins=[[1.0] * 3] * 4,
    bounds=[1e-4] * 12,
    draft_bounds=[[1e-4] * 3] * 4,
)
COUNTED = ServerCounters(1, 3, (3, 2, 1))
COMPLETION = list(range(8))


def failures(counters: ServerCounters, completion: list[int] = COMPLETION, exact: bool = True) -> list[str]:
    run = ServerRun("served", [completion], counters)
    return compare_with_server([REFERENCE], run, 3, 8, exact=exact).failures


def test_accepted_tokens_past_the_end_count_as_on_the_server() -> None:
    assert failures(COUNTED) == []
    run = ServerRun("served", [COMPLETION], COUNTED)
    compared = compare_with_server([REFERENCE], run, 3, 8, exact=True)
    assert compared.ours == compared.vllm


def test_other_traffic_is_reported() -> None:
    (reason,) = failures(ServerCounters(3, 9, (3, 2, 1)))
    assert "2 other requests" in reason


def test_fewer_accepted_tokens_or_a_different_completion_fail() -> None:
    assert failures(ServerCounters(1, 3, (2, 1, 0))) == ["acceptance lengths differ by 33.3%"]
    assert failures(COUNTED, [*COMPLETION[:5], 99, 99, 99]) == ["1 completions differ from the evaluator's"]
    # A server in half precision may write a different completion with the same acceptance.
    assert failures(COUNTED, [*COMPLETION[:5], 99, 99, 99], exact=False) == []
    assert failures(ServerCounters(1, 0, (0, 0, 0))) == ["vLLM drafted nothing"]
