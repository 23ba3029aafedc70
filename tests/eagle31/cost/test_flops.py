from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from eagle31.cost.flops import (
    StepCounts,
    count_step,
    sample_flops,
    step_flops,
    typical_counts,
)
from eagle31.training.step import rollout_loss, schedule_batch
from tests.eagle31.naive import naive_loss
from tests.eagle31.tiny import DFLASH, DSPARK, EAGLE3, MLA, random_batch, tiny_config, tiny_drafter

LINEAR = ("aten.mm", "aten.addmm", "aten.addmm_")


def added_product(total: Any, left: Any, right: Any, **_: Any) -> int:
    """Return the FLOPs of the in-place form, which PyTorch does not count. Shapes [m, n], [m, k], [k, n]."""
    return int(2 * left[0] * left[1] * right[1])


def measured_flops(run: Any) -> dict[str, int]:
    """Return PyTorch's count for forward and backward, by operator."""
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added_product})
    with counter:
        run().backward()
    return {str(op): int(n) for op, n in counter.get_flop_counts()["Global"].items()}


def test_the_formula_is_pytorchs_count_where_every_row_is_computed() -> None:
    num_steps, config = 3, tiny_config()
    drafter, frozen = tiny_drafter(config)
    frozen.target_head.requires_grad_(False)
    batch = random_batch((9, 12), config, seed=3)
    found = measured_flops(lambda: naive_loss(drafter, frozen, batch, num_steps=num_steps, step_decay=0.8)[0])
    length = len(batch.input_ids)
    counts = StepCounts(
        keys=length,
        rows=(length,) * num_steps,
        causal_pairs=length * length * num_steps,
        teachers=length,
    )
    expected = step_flops(config, counts, head_trained=True)
    linear = sum(found.get(op, 0) for op in LINEAR)
    # The naive step's teacher covers the full vocabulary, and each of its steps projects the embeddings.
    rest = config.vocab_size - config.draft_vocab_size
    query = config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    again = (num_steps - 1) * query + (num_steps - 2) * 2 * key
    projected_again = 6 * length * config.hidden_size * again
    assert (
        linear
        == expected.total
        - expected.attention
        + 2 * length * config.target_hidden_size * rest
        + projected_again
    )
    # It scores all pairs of rows at each step's keys, not only the diagonal ones.
    wasted = 12 * query * (length * length - length) * num_steps * (num_steps - 1) // 2
    assert sum(found.values()) - linear == expected.attention + wasted


@pytest.mark.parametrize(
    ("head_trained", "changes"),
    [
        (True, EAGLE3 | {"num_hidden_layers": 3}),
        (False, MLA | {"num_hidden_layers": 2}),
        (True, DSPARK),
        (False, DSPARK),
        (True, DFLASH),
    ],
)
def test_the_step_computes_what_the_formula_counts(head_trained: bool, changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    drafter, frozen = tiny_drafter(config)
    if not head_trained:
        frozen = replace(frozen, lm_head=drafter.lm_head.requires_grad_(False))
    batch = random_batch((30, 4, 70), config, seed=8, padding=4)

    def run() -> torch.Tensor:
        return rollout_loss(drafter, frozen, batch, num_steps=4, step_decay=0.8, with_metrics=False)[0]

    found = measured_flops(run)
    expected = step_flops(config, count_step(batch, 4, config), head_trained)
    assert sum(found.get(op, 0) for op in LINEAR) == expected.total - expected.attention


@pytest.mark.parametrize(("documents", "length", "answer"), [(3, 20, 8), (2, 30, 30)])
def test_typical_counts_are_those_of_equal_documents_with_one_answer(
    documents: int, length: int, answer: int
) -> None:
    batch = random_batch((length,) * documents, tiny_config())
    mask = torch.arange(length) >= length - answer
    batch = replace(batch, loss_mask=mask.repeat(documents))
    config = tiny_config()
    found = typical_counts(documents * length, 4, length, answer / length, config, max_drafts=answer)
    assert found.rows[0] == count_step(batch, 4, config, max_drafts=answer).rows[0] == answer
    every = count_step(batch, 4, config)
    for kept, of in ((found.teachers, every.teachers), (found.causal_pairs, every.causal_pairs)):
        assert kept == round(of * answer / every.rows[0])
    for layers, window in ((1, None), (1, 1), (1, 2), (2, 4), (1, 9), (2, 40)):
        config = tiny_config(num_hidden_layers=layers, sliding_window=window)
        found = typical_counts(documents * length, 4, length, answer / length, config)
        assert found == count_step(batch, 4, config)


@pytest.mark.parametrize(("layers", "window"), [(1, None), (1, 1), (2, 6), (1, 50)])
def test_counts_are_those_of_the_schedule(layers: int, window: int | None) -> None:
    config = tiny_config(num_hidden_layers=layers, sliding_window=window)
    for seed in range(4):
        batch = random_batch((11, 1, 2, 19, 3), config, seed=seed, padding=5)
        counts, schedule = count_step(batch, 5, config), schedule_batch(batch, 5, key_reach=config.key_reach)
        assert counts.keys == len(schedule.key_rows)
        assert counts.teachers == len(schedule.chunks[0].teacher_rows)
        assert counts.rows == tuple(len(step.rows) for step in schedule.chunks[0].steps)
        read = own = 0
        for step, scheduled in enumerate(schedule.chunks[0].steps):
            for row in scheduled.rows.tolist():
                positions = range(int(batch.position_ids[row]) + step, -1, -1)[:window]
                read += sum(position <= int(batch.position_ids[row]) for position in positions)
                own += sum(position > int(batch.position_ids[row]) for position in positions)
        assert counts.causal_pairs == read
        assert counts.rollout_pairs(window) == own


@pytest.mark.parametrize("changes", [{}, MLA, {"sliding_window": 7}])
def test_flops_of_samples_follow_those_of_their_steps(changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    batches = [random_batch((40 + 8 * seed,), config, seed=seed) for seed in range(6)]
    for batch in batches:
        batch.loss_mask[: len(batch.input_ids) // 2] = False
        batch.loss_mask[len(batch.input_ids) // 2 :] = True
    one_step = [count_step(batch, 1, tiny_config()) for batch in batches]
    supervision = torch.tensor([[c.keys, c.rows[0], c.causal_pairs] for c in one_step])
    found = sample_flops(config, 3, supervision, head_trained=True)
    expected = [
        step_flops(config, count_step(batch, 3, config), head_trained=True).total for batch in batches
    ]
    assert found.tolist() == pytest.approx(expected, rel=0.15)
    if config.sliding_window is not None:
        return
    alone = sample_flops(config, 1, supervision, head_trained=True)
    exactly = [step_flops(config, c, True).total for c in one_step]
    assert alone.tolist() == pytest.approx(exactly)
