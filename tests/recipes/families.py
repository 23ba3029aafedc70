"""Families of targets: a small random model of each, and what has been tried with it.

python -m tests.recipes.families [NAME...] tries them again, and prints their rows of docs/recipes.md.
"""

import contextlib
import json
import os
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from data.capture.vllm.environment import find_python
from data.target.architecture import from_architecture
from data.target.spec import TargetSpec
from eagle31.json_files import read_json, write_json
from tests.data.capture.vllm.capturing import STALL_SECONDS, capture_until_preempted, server_process
from tests.data.capture.vllm.targets import (
    KV_CACHE_BYTES,
    capture_engine,
    captured_target,
    largest_difference,
    make_prompts,
    make_samples,
)
from tests.recipes.quantized import quantize
from tests.recipes.stand_ins import (
    NUM_CONVERSATIONS,
    VOCAB_SIZE,
    assert_captured,
    conversations,
    save_model,
)
from tests.runs.here import run_command
from tests.train.small_run import assert_agreement
from tests.train.torchrun import run_here

TRANSFORMERS, VLLM_CAPTURE, TRAINED, SERVED = "transformers", "vLLM capture", "trained", "served"
# The ids of images are tokens that the tokenizer does not have.
_IMAGES = {name: VOCAB_SIZE + i for i, name in enumerate(("image_token_id", "video_token_id"))}
_VISION_ENDS = {"vision_start_token_id": VOCAB_SIZE + 2, "vision_end_token_id": VOCAB_SIZE + 3}
# vLLM's CPU kernels need heads of at least 32, and latent attention a latent of 512 with 64 rotated.
_DENSE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE + 8,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DELTA_NET = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_LATENT = {key: value for key, value in _DENSE.items() if key != "head_dim"} | {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# For targets whose own rotary parameters no drafter in vLLM has.
_DRAFTER_ROPE = "drafter.rope_parameters={rope_type: default, rope_theta: 10000.0}"


@dataclass(frozen=True)
class Family:
    """A family of targets.

    text: its config.json's keys of the text model, in `text_config` if the model is `wrapped`.
    layers: where transformers has the decoder layers.
    published: what its published config.json has where transformers saves otherwise.
    renamed: parts of the names of weights, as transformers saves them and as they are published.
    overrides: of its run.
    dtype: in which it runs.
    engine_args: of vLLM.
    in_chunks: whether vLLM prefills in chunks, which it does not with latent attention on a CPU.
    num_blocks: of the cache, so few that vLLM preempts; with linear layers it has one for each token.
    quantized: whether its weights are in INT4.
    error: the largest difference from transformers in float32, relative to the largest state; twice as much
        relative to the largest of the layer.
    missing: for each of "transformers", "vLLM capture" and "served" that does not work on a CPU, the reason.
    """

    title: str
    stand_in: str
    model_type: str
    text: dict[str, Any]
    wrapped: dict[str, Any] = field(default_factory=dict)
    layers: str = "model.layers"
    published: dict[str, Any] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    dtype: str = "float32"
    engine_args: tuple[str, ...] = ()
    in_chunks: bool = True
    num_blocks: int = 31
    quantized: bool = False
    error: float = 1e-3
    missing: dict[str, str] = field(default_factory=dict)

    def config(self, special: dict[str, Any]) -> PreTrainedConfig:
        text = self.text | special
        if self.wrapped:
            return from_architecture({"model_type": self.model_type, "text_config": text} | self.wrapped)
        return from_architecture({"model_type": self.model_type} | text)


# On a CPU, vLLM's delta net wants bfloat16 and heads of 128, and its prefix caching of linear layers a GPU.
_NO_PREFIX_CACHING = ("enable_prefix_caching=false",)
_BFLOAT16_ERROR = 0.2  # transformers differs from itself in float32 by up to 0.07
FAMILIES = {
    "qwen3_5": Family(
        "Qwen3.5, Qwen3.6",
        "gated delta net and full attention 3 to 1, multimodal, in bfloat16",
        "qwen3_5",
        _DENSE
        | _DELTA_NET
        | {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}},
        {"vision_config": _QWEN_VISION} | _IMAGES | _VISION_ENDS,
        dtype="bfloat16",
        engine_args=_NO_PREFIX_CACHING,
        num_blocks=320,
        error=_BFLOAT16_ERROR,
    ),
    "gpt_oss": Family(
        "gpt-oss",
        "sliding windows, sinks, YaRN, 2 of 4 experts, not in MXFP4",
        "gpt_oss",
        _DENSE | _EXPERTS | {"intermediate_size": 64, "sliding_window": 24},
    ),
    "deepseek_v4": Family(
        "DeepSeek V4",
        "four residual streams, both kinds of compressed attention, 2 of 4 experts",
        "deepseek_v4",
        _DENSE
        | {
            "num_key_value_heads": 1,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "num_hash_layers": 1,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            "o_groups": 2,
            "o_lora_rank": 16,
            "index_n_heads": 8,
            "index_head_dim": 32,
            "index_topk": 8,
            "sliding_window": 24,
        },
        published={
            "layer_types": None,
            "mlp_layer_types": None,
            "compress_ratios": [0, 4, 128, 4],
            "num_hash_layers": 1,
            "topk_method": "noaux_tc",
        },
        overrides=(_DRAFTER_ROPE,),
        missing={
            VLLM_CAPTURE: "vLLM keeps the mean of the streams, which the head does not read",
            SERVED: "not tried",
        },
    ),
    "kimi_k2_6": Family(
        "Kimi K2.5, K2.6",
        "latent attention, 2 of 16 experts, not in INT4, multimodal",
        "kimi_k25",
        _LATENT
        | {"model_type": "deepseek_v3", "n_routed_experts": 16, "topk_method": "noaux_tc"}
        # With other RoPE than YaRN, vLLM 0.32 on a CPU computes other states.
        | {"scoring_func": "sigmoid", "rope_parameters": _YARN},
        {
            "vision_config": _VISION | {"pos_emb_height": 4, "pos_emb_width": 4},
            "projection_hidden_size": 32,
            "tie_word_embeddings": False,
        }
        | _IMAGES
        | _VISION_ENDS,
        layers="model.language_model.layers",
        published={"architectures": ["KimiK25ForConditionalGeneration"]},
        renamed={"model.blocks": "model.layers", "model.mm_projector": "mm_projector"},
        overrides=("drafter.attention=mla",),
        in_chunks=False,
        missing={SERVED: "vLLM's CPU build fails as it starts, after an import of llvmlite"},
    ),
    "int4": Family(
        "INT4 (compressed-tensors)",
        "Qwen3, groups of 32 weights, in bfloat16",
        "qwen3",
        _DENSE,
        dtype="bfloat16",
        quantized=True,
        overrides=(
            "target.engine=vllm",
            "vllm.engine_args.dtype=bfloat16",
            "stages=[data,vocab,answers,capture,train,export,evaluate]",
        ),
        num_blocks=12,
        error=0.05,
        missing={TRANSFORMERS: "transformers needs the package compressed-tensors"},
    ),
}


def save_family(name: str, directory: Path) -> Path:
    """Save the family's model and conversations in a directory; return the model's."""
    examples = conversations(NUM_CONVERSATIONS, seed=0)
    save_model(FAMILIES[name].config, directory, examples)
    config = directory / "model" / "config.json"
    write_json(config, read_json(config) | FAMILIES[name].published)
    for saved, published in FAMILIES[name].renamed.items():
        weights = directory / "model" / "model.safetensors"
        tensors = {key.replace(saved, published): value for key, value in load_file(weights).items()}
        save_file(tensors, weights, metadata={"format": "pt"})
    (directory / "train.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    if FAMILIES[name].quantized:
        quantize(directory / "model")
    return directory / "model"


def try_family(name: str, directory: Path) -> dict[str, str]:
    """Run a family from data to serving; return "yes" or the reason for each step.

    What the family says is missing is not tried; transformers captures then.
    """
    family, run = FAMILIES[name], directory / "run"
    model = save_family(name, directory)
    reference = model.with_name("dequantized") if family.quantized else model
    results = {TRANSFORMERS: "yes"} | family.missing | {TRAINED: "yes"}
    engine: tuple[str, ...] = ("capture=hf",)
    if VLLM_CAPTURE not in family.missing:
        arguments = (*family.engine_args, *(IN_CHUNKS if family.in_chunks else ()))
        engine = ("capture=vllm", *(f"vllm.engine_args.{one}" for one in arguments))
        results[VLLM_CAPTURE] = "yes" if family.in_chunks else "yes, not in chunks"
    settings = [*run_arguments(model, directory / "train.jsonl", run), f"target.dtype={family.dtype}"]
    run_here("any_target", *settings, *engine, *family.overrides)
    assert_captured(run, reference, online=False, error=family.error)
    if VLLM_CAPTURE not in family.missing:
        assert_captured_when_preempted(family, model, reference, directory / "preempted")
    if TRANSFORMERS in family.missing:  # nothing drafts next to vLLM
        [evaluation] = run.glob("artifacts/evaluate-*/evaluation.json")
        assert_agreement(read_json(evaluation))
        results[SERVED] = "yes, by completions"
    elif SERVED not in family.missing:
        done = run_command(
            "scripts/check_serving",
            *(run / "export", "--target", model, "--dtype", family.dtype, "--max-new-tokens", 24),
            *("--engine-args", f"kv_cache_memory_bytes={KV_CACHE_BYTES}", *family.engine_args),
        )
        assert "verdict: vLLM serves what was trained" in done.out, done.out + done.err
        results[SERVED] = "yes"
    return results


def assert_captured_when_preempted(family: Family, model: Path, reference: Path, directory: Path) -> None:
    """Check the states of prompts that a server with a small cache computes while completions grow."""
    directory.mkdir()
    spec, ids = TargetSpec(str(model), dtype=family.dtype), (1, 2, 3)
    dataset, target = make_samples(12, seed=1), captured_target(spec, ids)
    arguments = (*family.engine_args, *(IN_CHUNKS if family.in_chunks else ("max_num_seqs=8",)))
    extra = {name: json.loads(value) for name, value in (one.split("=") for one in arguments)}
    engine = capture_engine(
        spec, ids, directory, num_gpu_blocks_override=family.num_blocks, block_size=32, **extra
    )
    line = engine.command_line()
    prompts = [prompt[:60] for prompt in make_prompts(16) if len(prompt) >= 60]
    with contextlib.closing(server_process(line, directory / "server.log", STALL_SECONDS)) as process:
        process.wait_until_ready(progress=False)
        for states, _ in capture_until_preempted(process.url, dataset, prompts, 60, target, directory):
            assert largest_difference(states, dataset, TargetSpec(str(reference)), ids) < 2 * family.error


IN_CHUNKS = ("max_num_batched_tokens=64", "max_num_seqs=8")


def run_arguments(model: Path, train: Path, run: Path) -> list[str]:
    return [
        f"target.model={model}",
        f"data.train={train}",
        f"output_dir={run}",
        "data.num_validation=3",
        "data.num_test=3",
        "data.max_tokens=160",
        "data.regenerate.enabled=false",
        "capture.codec=exact",
        "drafter.draft_vocab_size=200",
        "train.row_tokens=160",
        "train.max_steps=6",
        "optim.lr=5e-3",
        "deepspeed.precision=fp32",
        "export.dtype=float32",
        "evaluate.max_new_tokens=24",
        "stages=[data,vocab,answers,capture,train,export]",
    ]


def table_row(name: str, results: dict[str, str]) -> str:
    """Return the family's row of the table; transformers' capture is a test of every run."""
    family = FAMILIES[name]
    steps = [results[step] for step in (TRANSFORMERS, VLLM_CAPTURE, TRAINED, SERVED)]
    return f"| {family.title} | {family.stand_in} | {' | '.join(steps)} |"


if __name__ == "__main__":
    os.environ.setdefault("EAGLE31_VLLM_PYTHON", str(find_python()))
    for chosen in sys.argv[1:] or FAMILIES:
        try:
            with tempfile.TemporaryDirectory() as temporary, contextlib.redirect_stdout(sys.stderr):
                row = table_row(chosen, try_family(chosen, Path(temporary)))
            print(row, flush=True)
        except Exception:
            print(f"{chosen} does not work as tests/recipes/families.py says", flush=True)
            traceback.print_exc()
