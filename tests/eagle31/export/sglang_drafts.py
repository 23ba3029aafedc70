"""What SGLang's own model classes draft with exports, on a CPU. It runs in SGLang's environment.

python sglang_drafts.py DIRECTORY...: each has `export` and `inputs.safetensors`; gets `drafts.safetensors`.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sglang.srt.distributed import parallel_state
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_transformers_utils import get_config
from torch import Tensor


class Attention:
    """Causal attention over the rows of one sequence, in place of SGLang's backends."""

    prefill_attention_backend_str = decode_attention_backend_str = "triton"
    data_type = torch.float32

    def __init__(self) -> None:
        self.cached: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, *_: Any, q_rope: Any = None, k_rope: Any = None
    ) -> Tensor:
        if q_rope is None:
            q = q.view(len(q), layer.tp_q_head_num, -1)
        else:  # MLA: all heads read the latent as keys and as values
            q = torch.cat((q, q_rope), -1)
            k = torch.cat([one.view(len(k), 1, -1) for one in (k, k_rope)], -1)
            v = k[..., : layer.v_head_dim]
        old = self.cached.get(layer.layer_id, (k[:0], v[:0]))
        k, v = self.cached[layer.layer_id] = torch.cat((old[0], k)), torch.cat((old[1], v))
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        q, k, v = (one.transpose(0, 1)[None] for one in (q, k, v))
        attend = torch.nn.functional.scaled_dot_product_attention
        attended = attend(q, k, v, attn_mask=mask, scale=layer.scaling, enable_gqa=True)
        return attended[0].transpose(0, 1).flatten(1)


def captured_layers(target: Any, ids: list[int]) -> Tensor:
    """Return the layers before which a target's class captures states."""
    model = SimpleNamespace(pp_group=SimpleNamespace(is_last_rank=True), model=SimpleNamespace())
    target.set_eagle3_layers_to_capture(model, ids)
    return torch.tensor(model.model.layers_to_capture)


@torch.inference_mode()
def draft_logits(
    model: Any, input_ids: Tensor, aux: Tensor, positions: Tensor, num_rows: int, num_steps: int
) -> Tensor:
    """Return logits [K, R, Vd]: each row drafts after the rows before it, the tokens are teacher-forced."""
    logits = torch.empty(num_steps, num_rows, len(model.lm_head.weight))
    for row in range(num_rows):
        state, here = aux[: row + 1], slice(0, row + 1)
        with forward_context(ForwardContext(attn_backend=Attention())):
            for step in range(num_steps):
                ids, unused = input_ids[here.start + 1 : here.stop + 1], positions[:1]
                batch = ForwardBatch(ForwardMode.DECODE, 1, ids, unused, unused, unused, 1)
                batch.spec_info = SimpleNamespace(hidden_states=state)
                normed, [state] = model.model(ids, positions[here], batch)
                logits[step, row] = normed[-1] @ model.lm_head.weight.T
                state, here = state[-1:], slice(here.stop, here.stop + 1)
    return logits


def main(directories: list[Path]) -> None:
    first = directories[0] / "export"
    args = ServerArgs(model_path=str(first), device="cpu", attention_backend="torch_native", dtype="float32")
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0))
    meeting = f"file://{first}/rendezvous"
    parallel_state.init_distributed_environment(1, 0, meeting, 0, backend="gloo")
    parallel_state.initialize_model_parallel()
    for directory in directories:
        config = get_config(str(directory / "export"), trust_remote_code=False)
        model = ModelRegistry.resolve_model_cls(config.architectures)[0](config)
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)  # what is not loaded and read shows in the logits
        model.load_weights(load_file(directory / "export" / "model.safetensors").items())
        inputs = load_file(directory / "inputs.safetensors")
        logits = draft_logits(model, inputs["input_ids"], inputs["aux"], inputs["positions"], 8, 3)
        layers = config.eagle_config["eagle_aux_hidden_state_layer_ids"]
        drafts = {"logits": logits, "d2t": model.hot_token_id}
        drafts["llama"] = captured_layers(LlamaForCausalLM, layers)
        drafts["deepseek"] = captured_layers(DeepseekV2ForCausalLM, layers)
        save_file(
            {name: one for name, one in drafts.items() if one is not None}, directory / "drafts.safetensors"
        )


main([Path(one) for one in sys.argv[1:]])
