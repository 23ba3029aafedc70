"""The least and the largest value of the recipe's numbers, and which of its texts may be empty.

The checks of each group know what its values mean together; here is what holds for each alone.
"""

import dataclasses
from collections.abc import Iterator
from math import isfinite
from typing import Any

from eagle31.errors import UserError

MAX_DRAFT_TOKENS = 64  # a longer draft is never accepted to its end, and each token of it costs a pass
MIN_TEMPERATURE = 0.01  # vLLM takes lower ones as this one
MAX_TEMPERATURE = 100  # all tokens are then alike

# No setting means anything beyond these; a number that large is a slip, and overflows where it is used.
_LARGEST_INT, _LARGEST_FLOAT = 10**12, 1e12
_TOKENS = 1 << 24  # of a sample, a row, or a completion
_WIDTH = 1 << 20  # of a layer
_PROCESSES = 4096
_GB = 1e9  # an exabyte
_MINUTES = 60.0 * 24 * 366
_MAY_BE_EMPTY = {"capture.mooncake.device"}
# Values of others: of templates, vLLM and transformers.
_NOT_OURS = ("data.template_kwargs", "target.architecture", "vllm.engine_args")

# The range of each key, both ends included; None: another check has that end, or _LARGEST.
_RANGES: dict[str, tuple[int | float | None, int | float | None]] = {
    "seed": (0, 2**63 - 1),
    "train.seed": (0, 2**63 - 1),
    "target.checkpoint_gb": (None, _GB),
    "drafter.num_hidden_layers": (1, 64),
    "drafter.hidden_size": (1, _WIDTH),
    "drafter.intermediate_size": (1, _WIDTH),
    "drafter.num_attention_heads": (1, _WIDTH),
    "drafter.num_key_value_heads": (1, _WIDTH),
    "drafter.head_dim": (1, _WIDTH),
    "drafter.q_lora_rank": (1, _WIDTH),
    "drafter.kv_lora_rank": (1, _WIDTH),
    "drafter.qk_nope_head_dim": (1, _WIDTH),
    "drafter.qk_rope_head_dim": (1, _WIDTH),
    "drafter.v_head_dim": (1, _WIDTH),
    "drafter.max_position_embeddings": (1, 1 << 30),
    "drafter.sliding_window": (1, 1 << 30),
    "drafter.draft_vocab_size": (1, 1 << 30),
    "data.max_tokens": (None, _TOKENS),
    "data.num_workers": (None, _PROCESSES),
    "data.regenerate.max_new_tokens": (None, _TOKENS),
    "data.regenerate.temperature": (None, MAX_TEMPERATURE),
    "data.regenerate.batch_size": (None, 1 << 16),
    "data.regenerate.processes": (None, _PROCESSES),
    "data.regenerate.completions": (None, 1 << 16),
    "data.augment.documents_tokens": (None, _TOKENS),
    "capture.read_threads": (None, _PROCESSES),
    "capture.cache_gb": (None, _GB),
    "capture.shard_tokens": (None, 1 << 30),
    "capture.batch_tokens": (None, _TOKENS),
    "capture.stall_minutes": (None, _MINUTES),
    "capture.spool_gb": (None, _GB),
    "capture.max_pending_gb": (None, _GB),
    "capture.processes": (None, _PROCESSES),
    "capture.mooncake.segment_gb": (None, _GB),
    "vllm.start_minutes": (None, _MINUTES),
    "vllm.max_concurrency": (None, 1 << 20),
    "optim.eps": (None, 1),
    "optim.weight_decay": (None, 1000),
    "deepspeed.timeout_minutes": (None, _MINUTES),
    "train.ttt_steps": (None, MAX_DRAFT_TOKENS),
    "train.row_tokens": (None, _TOKENS),
    "train.rows_per_step": (None, 1 << 24),
    "train.position_gap_tokens": (None, 1 << 30),
    "evaluate.draft_tokens": (None, MAX_DRAFT_TOKENS),
    "evaluate.max_new_tokens": (None, _TOKENS),
    "evaluate.temperature": (None, MAX_TEMPERATURE),
    "plan.num_nodes": (None, 1 << 20),
    "plan.gpus_per_node": (None, 1024),
    "plan.gpu_memory_gb": (None, _GB),
    "launcher.gpus_per_node": (None, 1024),
    "launcher.nodes": (None, 1 << 20),
    "launcher.servers_per_node": (None, 1024),
    "launcher.cpus_per_task": (None, 1 << 20),
}


def check_limits(settings: Any) -> None:
    """Refuse what no setting can be: NaN, infinity, numbers out of their range, and empty texts.

    Raises:
        UserError: names the key, the value and what is expected.
    """
    for key, value in _leaves(settings):
        if key.startswith(_NOT_OURS):
            continue
        if isinstance(value, str) and not value.strip() and key not in _MAY_BE_EMPTY:
            raise UserError(key, repr(value), "It is empty, perhaps by a shell variable without a value.")
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_number(key, value)


def check_temperature(key: str, value: float) -> None:
    """Raise UserError for a temperature, other than 0, at which logits overflow."""
    if 0 < value < MIN_TEMPERATURE:
        raise UserError(key, value, f"It must be 0 for greedy, or at least {MIN_TEMPERATURE}.")


def _check_number(key: str, value: float) -> None:
    if isinstance(value, float) and not isfinite(value):
        raise UserError(key, value, "Give a finite number.")
    least, largest = _RANGES.get(key, (None, None))
    if largest is None:
        largest = _LARGEST_FLOAT if isinstance(value, float) else _LARGEST_INT
    if least is not None and value < least:
        raise UserError(key, value, f"It must be at least {least}.")
    if value > largest or (least is None and value < -largest):
        raise UserError(key, value, f"It must be at most {largest}.")


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that has no parts, by its dotted key; entries of a list have the list's key."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _leaves(one, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one, prefix)
    else:
        yield prefix, value
