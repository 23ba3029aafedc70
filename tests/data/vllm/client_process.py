"""A client in a separate process that a test kills: TARGET ROOT AUX_LAYER_IDS NUM_SAMPLES [SERVER]."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from data.capture.offline import StoreSpec
from data.store.codec import Encoding
from data.target.spec import TargetSpec
from data.vllm.client import capture_through_vllm
from data.vllm.engine import LocalEngine
from data.vllm.server import VllmServer
from tests.data.vllm.targets import capture_engine, expected_states, make_samples

if __name__ == "__main__":
    target, root, ids, num_samples, *server = sys.argv[1:]
    spec, aux_layer_ids = TargetSpec(target), tuple(json.loads(ids))
    engine = capture_engine(spec, aux_layer_ids, Path(root))
    own = LocalEngine.of(engine, Path(root) / "engine.log", concurrency=4)
    capture_through_vllm(
        [StoreSpec(Path(root) / "store", make_samples(int(num_samples)), Encoding("exact", "all"))],
        expected_states(spec, aux_layer_ids),
        [VllmServer(server[0], concurrency=2)] if server else [own],
        shard_tokens=500,
        manifest_fields={"target": "tiny"},
    )
