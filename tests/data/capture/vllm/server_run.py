"""A run that starts a server and does nothing else: TARGET ROOT AUX_LAYER_IDS"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from data.target.spec import TargetSpec
from eagle31.json_files import write_json
from tests.data.capture.vllm.capturing import STALL_SECONDS, server_process
from tests.data.capture.vllm.targets import capture_engine

# It prefills in chunks, and its cache is too small for the prompts of a test.
SMALL = {
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "enable_prefix_caching": True,
    "num_gpu_blocks_override": 31,
}

if __name__ == "__main__":
    target, root, ids = sys.argv[1:]
    engine = capture_engine(TargetSpec(target), tuple(json.loads(ids)), Path(root), **SMALL)
    server = server_process(engine.command_line(), Path(root) / "server.log", STALL_SECONDS)
    server.wait_until_ready(progress=False)
    write_json(Path(root) / "server.json", {"url": server.url, "process_id": server.process_id})
    while True:
        time.sleep(600)
