"""The drafters that are compared with vLLM: every shape an export can have, each trained by a real run.

python parity_cases.py DIRECTORY TARGET_STEPS ROWS_PER_STEP TTT_STEPS NAME...: trains them.
"""

import json
import os
import shutil
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from data.embedded.corpus import ChatExample, read_corpus, standard_library
from data.embedded.tokenizer import save_tokenizer, train_tokenizer
from data.embedded.training import TrainingSettings, encode, initialize, pretrain
from eagle31.export.write import write_export
from eagle31.json_files import write_text
from eagle31.model.kinds import new_drafter
from eagle31.model.vocab import build_draft_vocab
from tests.shared import TRAINING_CODE, make_cached
from train.config.compose import composed
from train.config.run import RunConfig
from train.context import RunContext
from train.distributed import World, leave_ranks
from train.drafter.build import initialize as initialize_drafter
from train.pipeline import run_pipeline

MAX_POSITIONS = 512
SCALED_FROM = 64  # positions
TARGET_WIDTH, NUM_LAYERS = 64, 6
# Scaling that reaches into the positions of a few hundred tokens, so that losing it shows.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": SCALED_FROM,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": SCALED_FROM,
}
DEEPSEEK_ROPE = YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class TargetCase:
    """A small target, trained for some seconds on real functions."""

    family: str
    tied: bool
    rope_parameters: dict[str, Any]


@dataclass(frozen=True)
class DrafterCase:
    """One export: a target and what the recipe says of the drafter."""

    target: str
    overrides: tuple[str, ...]
    core: bool = False  # part of every test run, not of `--full` alone
    # Serves the target's MLA as plain attention: vLLM's CPU kernels for MLA and for grouped queries share no
    # block size.
    expand_mla: bool = False
    # Parts of a published drafter, which no setting makes: the training starts from a checkpoint with them.
    started_with: tuple[str, ...] = ()


TARGETS = {
    "llama": TargetCase("llama", False, PLAIN_ROPE),
    "llama_tied_llama3_rope": TargetCase("llama", True, LLAMA3_ROPE),
    "qwen3_tied": TargetCase("qwen3", True, PLAIN_ROPE),
    "qwen3_yarn": TargetCase("qwen3", False, YARN_ROPE),
    "deepseek_yarn": TargetCase("deepseek_v3", False, DEEPSEEK_ROPE),
}

# The shapes of the targets' attention.
GROUPED = {"num_key_value_heads": 1, "head_dim": 32}
LATENT = {
    "num_key_value_heads": 2,
    **{"q_lora_rank": 48, "kv_lora_rank": 512},
    **{"qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32},
    # All layers are dense; the drafter's width comes from that of the experts, which is 18,432 by default.
    **{"first_k_dense_replace": NUM_LAYERS, "num_mtp_layers": 0, "moe_intermediate_size": 16},
}

EAGLE3 = ("drafter=eagle3",)
PRUNED = ("drafter.draft_vocab_size=300",)
NORM_BEFORE = ("drafter.norm_before_residual=true",)
TWO_LAYERS = ("drafter.num_hidden_layers=2",)
NARROWER = ("drafter.hidden_size=32", "drafter.intermediate_size=96")
WIDER = ("drafter.hidden_size=96", "drafter.num_attention_heads=3", "drafter.num_key_value_heads=1")
BF16 = ("export.dtype=bfloat16",)
MLA = ("drafter.attention=mla",)
DSPARK, DFLASH = ("drafter=dspark", "drafter.markov_rank=16"), ("drafter=dflash",)
QK_NORM = ("drafter.attention=gqa_qk_norm",)
SPECULATORS = ("export.layout=speculators",)
SGLANG = ("export.layout=sglang",)
WINDOW = ("drafter.sliding_window=24",)  # shorter than the prompts


def aux(*layer_ids: int) -> tuple[str, ...]:
    return (f"drafter.aux_layer_ids=[{','.join(map(str, layer_ids))}]",)


CASES = {
    "eagle31_llama3_rope": DrafterCase("llama_tied_llama3_rope", PRUNED + aux(1, 3, 5)),
    "eagle3_norm_before_full_vocab_two_aux_bf16": DrafterCase(
        "qwen3_tied", EAGLE3 + NORM_BEFORE + aux(1, 4) + BF16
    ),
    "eagle31_four_aux_two_layers_narrower_yarn": DrafterCase(
        "qwen3_yarn", PRUNED + NORM_BEFORE + aux(0, 2, 3, 6) + TWO_LAYERS + NARROWER
    ),
    "eagle31_full_vocab_speculators": DrafterCase("llama_tied_llama3_rope", SPECULATORS + aux(1, 2, 5)),
    "eagle31_qk_norm_window_five_aux_speculators": DrafterCase(
        "llama_tied_llama3_rope",
        (
            *(*QK_NORM, *SPECULATORS, *WINDOW, *PRUNED, *NORM_BEFORE, *TWO_LAYERS, *NARROWER),
            *aux(0, 2, 3, 5, 6),
        ),
        core=True,
    ),
    "eagle3_norm_before_fc_biases": DrafterCase(
        "llama",
        EAGLE3 + TWO_LAYERS + aux(2, 3, 5),
        started_with=("norm_before_fc", "attention_bias", "mlp_bias"),
    ),
    "eagle31_sglang": DrafterCase("llama", SGLANG + PRUNED + aux(2, 3, 5)),
    "eagle31_wider_bf16": DrafterCase("llama", PRUNED + WIDER + BF16 + aux(1, 2, 4, 5)),
    "eagle3_yarn_window_pruned_norm_before_four_aux": DrafterCase(
        "qwen3_yarn", EAGLE3 + WINDOW + PRUNED + NORM_BEFORE + aux(1, 2, 4, 6)
    ),
    "eagle3_speculators_pruned_two_aux": DrafterCase(
        "llama", EAGLE3 + PRUNED + SPECULATORS + NORM_BEFORE + aux(2, 5)
    ),
    "dspark": DrafterCase("llama", DSPARK + PRUNED + TWO_LAYERS + aux(1, 3, 5), core=True),
    "dflash": DrafterCase("llama", DFLASH + PRUNED + TWO_LAYERS + aux(0, 2, 5)),
    "eagle31_mla": DrafterCase("deepseek_yarn", MLA + PRUNED + aux(1, 3, 5), core=True),
    "eagle3_mla_norm_before_two_layers_full_vocab": DrafterCase(
        "deepseek_yarn", MLA + EAGLE3 + NORM_BEFORE + TWO_LAYERS + aux(2, 5)
    ),
    "eagle31_gqa_for_mla_target": DrafterCase("deepseek_yarn", PRUNED + aux(1, 3, 5), expand_mla=True),
    "eagle31_frozen_head": DrafterCase(
        "llama_tied_llama3_rope", (*PRUNED, "drafter.train_lm_head=false", *BF16, *aux(2, 4, 6))
    ),
}
# Exports that are also served as somebody else would have published them.
PUBLISHED = (
    "eagle31_llama3_rope",
    "eagle31_full_vocab_speculators",
    "eagle31_mla",
)
# vLLM drafts so in Model Runner V2 alone.
ON_V2_ALONE = tuple(name for name in CASES if name in ("dspark", "dflash"))
CORE = tuple(name for name, case in CASES.items() if case.core)


def build_target(case: TargetCase, directory: Path, steps: int) -> None:
    """Weights, tokenizer and `train.jsonl` in `directory`."""
    corpus = read_corpus(standard_library() / "email")
    model_directory = directory / "model"
    tokenizer = train_tokenizer(corpus.train, 512, MAX_POSITIONS)
    save_tokenizer(tokenizer, model_directory)
    model = make_model(case, len(tokenizer), tokenizer.eos_token_id)
    settings = TrainingSettings(steps=steps, batch_tokens=1024, max_document_tokens=256)
    documents = encode(tokenizer, corpus.train, settings.max_document_tokens)
    pretrain(model, documents, settings, progress=False)  # type: ignore[arg-type]
    (directory / "checkpoint.pt").unlink(missing_ok=True)
    write_text(directory / "train.jsonl", to_jsonl(corpus.train))
    model.save_pretrained(model_directory)


def make_model(case: TargetCase, vocab_size: int, eos_token_id: int) -> PreTrainedModel:
    config_class, model_class, attention = {
        "llama": (LlamaConfig, LlamaForCausalLM, GROUPED),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM, GROUPED),
        "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM, LATENT),
    }[case.family]
    config = config_class(
        **attention,
        vocab_size=vocab_size,
        hidden_size=TARGET_WIDTH,
        intermediate_size=160,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=dict(case.rope_parameters),
        tie_word_embeddings=case.tied,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=None,
        dtype="float32",
    )
    model = model_class(config)
    initialize(model, seed=0)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=eos_token_id)
    return model


def to_jsonl(conversations: list[ChatExample]) -> str:
    return "".join(json.dumps(conversation) + "\n" for conversation in conversations)


def recipe_arguments(name: str, directory: Path, rows_per_step: int, ttt_steps: int) -> list[str]:
    """Return what a user would write after `torchrun train/main.py`."""
    case = CASES[name]
    target = directory / "targets" / case.target
    return [
        "recipe=any_target",
        "recipe_name=parity",
        "data.regenerate.enabled=false",
        "capture.codec=exact",
        f"target.model={target / 'model'}",
        f"data.train={target / 'train.jsonl'}",
        f"output_dir={directory / 'runs' / case.target}",
        "data.num_validation=2",
        "data.num_test=12",
        "data.max_tokens=256",
        "train.row_tokens=256",
        f"train.rows_per_step={rows_per_step}",
        "train.max_steps=45",
        "train.validate_every=45",
        "train.save_every=45",
        f"train.ttt_steps={ttt_steps}",
        "optim.lr=5e-3",
        "deepspeed.precision=fp32",
        "export.dtype=float32",
        "evaluate.max_new_tokens=8",  # of the held-out answers, of which only the prompts are used
        "stages=[data,vocab,answers,capture,train,export]",
        *(() if set(PRUNED) & set(case.overrides) else ("drafter.draft_vocab_size=null",)),
        *case.overrides,
    ]


def export_path(name: str, directory: Path) -> Path:
    return directory / "exports" / name


def target_path(name: str, directory: Path) -> Path:
    return directory / "targets" / CASES[name].target / "model"


def train_case(name: str, directory: Path, target_steps: int, rows_per_step: int, ttt_steps: int) -> None:
    """Runs the pipeline up to the export; runs of one target share its finished stages."""
    target = directory / "targets" / CASES[name].target
    if not target.exists():
        case = TARGETS[CASES[name].target]
        build = partial(build_target, case, steps=target_steps)
        cached = make_cached(f"{CASES[name].target}-{target_steps}", [*TRAINING_CODE, Path(__file__)], build)
        shutil.copytree(cached, target)
    arguments = recipe_arguments(name, directory, rows_per_step, ttt_steps)
    if CASES[name].started_with:
        start = directory / "starts" / name
        save_start(start, composed(arguments), CASES[name].started_with)
        arguments.append(f"drafter.init_from={start}")
    config = composed(arguments)
    run_pipeline(config, World.from_environment())
    link = export_path(name, directory)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to((directory / "runs" / CASES[name].target / "export").resolve())


def save_start(directory: Path, config: RunConfig, parts: tuple[str, ...]) -> None:
    """Save an untrained drafter of the recipe's shape, with these parts and every token."""
    context = RunContext(config, World.from_environment())
    changes: dict[str, Any] = dict.fromkeys(parts, True)
    shape = replace(context.drafter.config(), **changes)
    torch.manual_seed(0)
    drafter = new_drafter(shape)
    initialize_drafter(drafter)
    for name, parameter in drafter.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    vocab = build_draft_vocab(torch.ones(shape.vocab_size, dtype=torch.int64), None, [])
    state = {name: parameter.detach() for name, parameter in drafter.named_parameters()}
    embed_tokens = context.target.parts.embed_tokens
    write_export(directory, shape, state, vocab, embed_tokens, dtype="float32", provenance={})


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    where, lengths = Path(sys.argv[1]).resolve(), tuple(map(int, sys.argv[2:5]))
    # Starting a process for each reload would take as long as some of the runs.
    for case_name in sys.argv[5:]:
        train_case(case_name, where, *lengths)
    leave_ranks(World.from_environment())
