"""Runs in TorchSpec's environment: its EagleMooncakeStore takes what we put, and puts it under another key.

torchspec_store.py MASTER METADATA_URL NUM_AUX_LAYERS HIDDEN_SIZE NUM_TOKENS TAKEN.safetensors
"""

import sys

import torch
from safetensors.torch import save_file
from torchspec.config.mooncake_config import MooncakeConfig
from torchspec.transfer.mooncake.eagle_store import EagleMooncakeStore


def main(
    master: str, metadata: str, num_aux_layers: int, hidden_size: int, num_tokens: int, path: str
) -> None:
    config = MooncakeConfig(
        local_hostname="127.0.0.1",
        metadata_server=metadata,
        master_server_address=master,
        global_segment_size=0,
        local_buffer_size=16 << 20,
        host_buffer_size=16 << 20,
        enable_hard_pin=True,
    )
    store = EagleMooncakeStore(config)
    store.setup()
    shapes = {
        "hidden_states": (num_tokens, num_aux_layers * hidden_size),
        "input_ids": (num_tokens,),
        "last_hidden_states": (num_tokens, hidden_size),
    }
    got = store.get("ours", shapes, {}, torch.device("cpu"))
    taken = {name: getattr(got, name).clone() for name in shapes}
    store.remove_eagle3_tensors("ours", has_last_hidden_states=True)
    # It narrows them to its own dtype again.
    store.put(
        "theirs", taken["hidden_states"].float(), taken["input_ids"], taken["last_hidden_states"].float()
    )
    store.flush()
    save_file(taken, path)
    store.close()


if __name__ == "__main__":
    sizes = map(int, sys.argv[3:6])
    main(sys.argv[1], sys.argv[2], next(sizes), next(sizes), next(sizes), sys.argv[6])
