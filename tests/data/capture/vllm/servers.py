"""What a vLLM server of eagle31 says about itself."""

from data.capture.vllm.server_info import ServerInfo

INFO = ServerInfo(
    model="org/target",
    target_fingerprint=None,
    aux_layer_ids=(2, 4, 6),
    num_layers=8,
    hidden_size=16,
    dtype="bfloat16",
    device="cuda",
    vocab_size=100,
    max_tokens=64,
    cache_tokens=1000,
    async_scheduling=False,
)
