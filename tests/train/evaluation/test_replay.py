import torch

from data.batches.rows import pack_row
from data.samples import CapturedSample
from data.sampling import Sampling
from tests.eagle31.tiny import random_batch, tiny_config, tiny_drafter
from train.evaluation.replay import replay_greedily, sampling_report

NUM_PROMPT_TOKENS = 6


def sample(num_tokens: int, changed: int | None = None) -> CapturedSample:
    """Make a prompt and a completion; the token at index `changed` is another one."""
    batch = random_batch((40,), tiny_config(), seed=3, dtype=torch.float32)
    ids = batch.input_ids.clone()
    if changed is not None:
        ids[changed] = (ids[changed] + 1) % tiny_config().vocab_size
    mask = torch.arange(40) >= NUM_PROMPT_TOKENS
    parts = (ids, mask, batch.aux_hidden_states, batch.final_hidden_states)
    return CapturedSample(*(part[:num_tokens] for part in parts))


def test_the_hash_is_of_prompts_and_completions_and_not_of_rows() -> None:
    drafter, frozen = tiny_drafter(tiny_config(), torch.float32)

    def hash_of(*rows: list[CapturedSample]) -> str | None:
        batches = [pack_row(row, sum(len(one.input_ids) for one in row)) for row in rows]
        return replay_greedily(drafter, frozen, batches, 2).texts_hash

    first, second = sample(30), sample(40, changed=0)
    known = hash_of([first, second])
    assert known is not None
    assert hash_of([first], [second]) == known
    for other in (sample(29), sample(30, changed=20), sample(30, changed=NUM_PROMPT_TOKENS - 1)):
        assert hash_of([other, second]) != known
    assert hash_of([second, first]) != known
    batch = pack_row([first, second], 70)
    sampled = sampling_report(drafter, frozen, [batch], 2, Sampling(8, (0,), temperature=0.7, seed=0))
    assert sampled is not None
    assert sampled["greedy_drafts"]["texts_hash"] == sampled["sampled_drafts"]["texts_hash"] == known


def test_a_completion_of_one_token_has_no_draft() -> None:
    drafter, frozen = tiny_drafter(tiny_config(), torch.float32)
    short = sample(NUM_PROMPT_TOKENS + 1)
    for row, num_drafts in (([short], [0]), ([short, sample(30)], [0, 22])):
        batch = pack_row(row, sum(len(one.input_ids) for one in row))
        found = replay_greedily(drafter, frozen, [batch], 2)
        assert [
            lengths[0].num_drafts <= most for lengths, most in zip(found.by_prompt, num_drafts, strict=True)
        ]
    assert found.by_prompt[0][0].num_drafts == 0


def test_only_greedy_drafts_are_measured_where_a_part_of_the_tokens_is_sampled_from() -> None:
    drafter, frozen = tiny_drafter(tiny_config(), torch.float32)
    how = Sampling(8, (0,), temperature=0.7, seed=0, top_p=0.9)
    found = sampling_report(drafter, frozen, [pack_row([sample(30)], 30)], 2, how)
    assert found is not None
    assert found["greedy_drafts"]["by_draft_length"]
    assert "sampled_drafts" not in found
