"""Small random targets with the architecture and the layers of the recipes' targets, and text for them."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from data.capture.hf import HiddenStateCapture
from data.embedded.corpus import ChatExample, Message
from data.embedded.tokenizer import END_TOKEN, PAD_TOKEN, save_tokenizer, train_tokenizer
from data.store import HiddenStateStore
from data.target.architecture import from_architecture, model_class
from data.target.loading import load_target
from data.target.modules import locate
from data.target.spec import TargetSpec
from tests.train.torchrun import composed

VOCAB_SIZE = 400
MAX_POSITIONS = 512
NUM_CONVERSATIONS = 40
_WORDS = ("red", "green", "blue", "old", "new", "big", "small", "dog", "cat", "bird", "tree", "sees", "finds")

# The sizes of stand-ins, by model type. The number and kinds of layers, norms, biases, RoPE and whether
# embeddings are tied are the recipe's. vLLM's CPU kernels need heads of at least 32, and latent attention a
# latent of 512 with a rotated part of 64.
_DENSE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
}
_DELTA_NET = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_SHARED_EXPERT = {"shared_expert_intermediate_size": 32}
_LOCAL_EXPERTS = {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
SMALL: dict[str, dict[str, Any]] = {
    "llama": _DENSE,
    "mistral": _DENSE,
    "ministral3": _DENSE,
    "qwen3": _DENSE,
    "qwen3_moe": _DENSE | _EXPERTS,
    "qwen3_next": _DENSE | _EXPERTS | _DELTA_NET | _SHARED_EXPERT,
    "qwen3_5_moe_text": _DENSE | _EXPERTS | _DELTA_NET | _SHARED_EXPERT,
    "gpt_oss": _DENSE | _LOCAL_EXPERTS,
    "minimax_m2": _DENSE | _LOCAL_EXPERTS | {"rotary_dim": 16},
    "minimax_m3_vl_text": _DENSE
    | _LOCAL_EXPERTS
    | {"dense_intermediate_size": 96, "shared_intermediate_size": 32}
    | {"index_n_heads": 2, "index_head_dim": 32},
    "gemma4_text": _DENSE
    | {"num_global_key_value_heads": 1, "global_head_dim": 32, "sliding_window": 24}
    | {"moe_intermediate_size": 32, "num_experts": 4, "top_k_experts": 2},
    # With fewer heads, several keys have the score 0, and which of them are read depends on the padding.
    "glm_moe_dsa": _DENSE
    | _LATENT
    | {"n_routed_experts": 4, "index_n_heads": 16, "index_head_dim": 96, "index_topk": 24},
    "nemotron_h": _DENSE
    | {"mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 16}
    | {"n_routed_experts": 4, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32}
    | {"num_experts_per_tok": 2},
    # How vLLM routes, which transformers does without being told.
    "deepseek_v3": {key: value for key, value in _DENSE.items() if key != "head_dim"}
    | _LATENT
    | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "qwen3_5_text": _DENSE | _DELTA_NET,
    "deepseek_v4": _DENSE
    | {"num_key_value_heads": 1, "q_lora_rank": 32, "qk_rope_head_dim": 16, "moe_intermediate_size": 32}
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "o_groups": 2, "o_lora_rank": 16}
    | {"index_n_heads": 8, "index_head_dim": 32, "index_topk": 8, "sliding_window": 24},
}
# On a CPU vLLM 0.32 runs these in bfloat16 or not at all, so transformers does, online as in the recipes.
NOT_IN_VLLM = ("qwen3_5_text", "deepseek_v4")


@dataclass(frozen=True)
class StandIn:
    """A small target in place of a recipe's, with conversations in the recipe's format."""

    model: Path
    train: Path
    sizes: dict[str, Any]  # the keys of target.architecture that differ from the recipe's

    def arguments(self) -> list[str]:
        """Return the overrides that put the stand-in in the place of the recipe's target and data."""
        return [
            f"target.model={self.model}",
            "target.checkpoint_gb=null",
            f"data.train={self.train}",
            "data.eval=null",
            "data.split=train",
            *(f"target.architecture.{name}={value}" for name, value in self.sizes.items()),
        ]


def save_stand_in(recipe: str, directory: Path, seed: int = 0, **other_sizes: Any) -> StandIn:
    """Save a random target with the layers of the recipe's target, its tokenizer, and conversations.

    Args:
        other_sizes: further keys of `target.architecture` that differ from the recipe's.
    """
    architecture = composed(recipe, "target.model=x", "data.train=x").target.architecture
    sizes = SMALL[architecture["model_type"]] | other_sizes
    examples = conversations(NUM_CONVERSATIONS, seed)
    save_model(lambda special: from_architecture(architecture | sizes | special), directory, examples, seed)
    train = directory / "train.jsonl"
    lines = (json.dumps(example if "qwen3" in recipe else as_sharegpt(example)) for example in examples)
    train.write_text("\n".join(lines) + "\n")
    return StandIn(directory / "model", train, sizes)


def save_model(
    make_config: Callable[[dict[str, Any]], PreTrainedConfig],
    directory: Path,
    examples: Sequence[ChatExample],
    seed: int = 0,
) -> None:
    """Save a random model and its tokenizer in `directory / "model"`.

    Args:
        make_config: from the keys that depend on the tokenizer, and those that all stand-ins share.
    """
    tokenizer = train_tokenizer(examples, VOCAB_SIZE, MAX_POSITIONS)
    end, pad = (tokenizer.convert_tokens_to_ids(token) for token in (END_TOKEN, PAD_TOKEN))
    special = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": pad}
    config = make_config(special | {"dtype": "float32", "initializer_range": 0.1})
    torch.manual_seed(seed)
    wrapped = type(config) in AutoModelForImageTextToText._model_mapping
    model = (AutoModelForImageTextToText if wrapped else model_class(config)).from_config(config)
    scatter(model)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
    model.save_pretrained(directory / "model")
    save_tokenizer(tokenizer, directory / "model")


def scatter(model: PreTrainedModel) -> None:
    """Give norms and biases random values, so that one that is forgotten changes the result."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                nn.init.uniform_(parameter, 0.5, 1.5)
            elif parameter.dim() == 1:
                nn.init.normal_(parameter, std=0.1)


def conversations(number: int, seed: int) -> list[ChatExample]:
    """Return conversations of one and two turns."""
    draw = random.Random(seed)
    examples = []
    for index in range(number):
        messages: list[Message] = []
        for _ in range(1 + index % 2):
            words = draw.choices(_WORDS, k=draw.randint(4, 12))
            messages.append(Message(role="user", content=f"Turn around: {' '.join(words)}"))
            messages.append(Message(role="assistant", content=" ".join(reversed(words))))
        examples.append(ChatExample(id=str(index), messages=messages))
    return examples


def as_sharegpt(example: ChatExample) -> dict[str, Any]:
    """Return the conversation in the columns of ShareGPT."""
    names = {"user": "human", "assistant": "gpt"}
    turns = [{"from": names[one["role"]], "value": one["content"]} for one in example["messages"]]
    return {"id": example["id"], "conversations": turns}


def small_run(recipe: str, stand_in: StandIn, output_dir: Path, num_ranks: int = 2) -> list[str]:
    """Return the overrides that put the stand-in into a recipe and make its run short."""
    config = composed(recipe, "target.model=x", "data.train=x")
    row_tokens = 160 if num_ranks <= 2 else 72  # the few samples fill a row for every rank
    arguments = [
        *stand_in.arguments(),
        f"output_dir={output_dir}",
        f"data.max_tokens={row_tokens}",
        "data.num_validation=3",
        "data.num_test=3",
        "data.regenerate.max_new_tokens=12",
        "data.max_samples=16",
        "capture.spool_gb=0.02",
        f"train.row_tokens={row_tokens}",
        f"train.rows_per_step={num_ranks}",
        "train.max_steps=2",
        "train.log_every=1",
        "evaluate.max_new_tokens=12",
    ]
    if config.target.architecture["model_type"] in NOT_IN_VLLM:
        arguments += ["target.engine=hf", "capture=hf_online"]
    if config.drafter.draft_vocab_size is not None:
        arguments.append("drafter.draft_vocab_size=200")
    if "tensor_parallel_size" in config.vllm.engine_args:
        arguments.append("vllm.engine_args.tensor_parallel_size=1")
    return arguments


def assert_captured(run: Path, target: Path, *, online: bool, error: float = 1e-3) -> None:
    """Check that only held-out states are stored where training is online, and that they are the target's.

    Args:
        error: the largest difference from transformers in float32, relative to the largest state.
    """
    stores = {path.parent.name for path in run.glob("artifacts/capture-*/*/shard-*.safetensors")}
    assert stores == {"validation", "test"} | (set() if online else {"train"})
    [directory] = run.glob("artifacts/capture-*/validation")
    store, spec = HiddenStateStore(directory), TargetSpec(str(target))
    model = load_target(spec, torch.device("cpu"))
    capture = HiddenStateCapture(model, locate(model), tuple(store.manifest["aux_layer_ids"]))
    for sample in store.get_many(range(len(store))):
        [(aux, final)] = capture.capture([sample.input_ids])
        kept = sample.aux_hidden_states.abs().amax(dim=(1, 2)) > 0  # others are read by no draft
        assert kept.sum() >= len(kept) - 2
        for ours, theirs in (
            (sample.aux_hidden_states[kept], aux[kept]),
            (sample.final_hidden_states, final),
        ):
            needed = ours.flatten(1).abs().amax(1) > 0
            assert (ours[needed] - theirs[needed]).abs().max() / theirs.abs().max() < error
