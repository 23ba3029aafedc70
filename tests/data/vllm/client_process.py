"""A run in a separate process that a test kills: TARGET ROOT AUX_LAYER_IDS NUM_SAMPLES [SERVER].

It captures through the server, or through one that it starts and that prefills as the test's target needs.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from data.capture.opening import StoreSpec
from data.store.codec import Encoding
from data.target.spec import TargetSpec
from data.vllm.client import capture_through_vllm
from data.vllm.server import VllmServer
from data.vllm.server_process import ServerProcess
from tests.data.vllm.targets import START_SECONDS, capture_engine, expected_states, make_samples

KEY = "the-key-of-this-test"

if __name__ == "__main__":
    target, root, ids, num_samples, *server = sys.argv[1:]
    spec, aux_layer_ids = TargetSpec(target), tuple(json.loads(ids))
    if server:
        endpoint = VllmServer(server[0], concurrency=2)
    else:
        process = ServerProcess(
            capture_engine(spec, aux_layer_ids, Path(root)).command_line(),
            host="127.0.0.1",
            port=None,
            key=KEY,
            devices=None,
            log=Path(root) / "server.log",
            limit_seconds=START_SECONDS,
        )
        process.wait_until_ready(progress=True)
        endpoint = VllmServer(process.url, concurrency=4, key=KEY, check=process.check)
    capture_through_vllm(
        [StoreSpec(Path(root) / "store", make_samples(int(num_samples)), Encoding("exact", "all"))],
        expected_states(spec, aux_layer_ids),
        [endpoint],
        shard_tokens=500,
        manifest_fields={"target": "tiny"},
    )
