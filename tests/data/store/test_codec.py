from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from data.batches.rows import pack_row
from data.samples import CapturedSample, StateShape
from data.store.codec import (
    CODECS,
    ROWS_OF,
    Rows,
    decode,
    decode_into,
    decoded_dtype,
    encode,
    encoded_bytes,
    kept_rows,
    supervised_final,
)
from eagle31.training.batch import PackedBatch
from eagle31.training.step import rollout_loss, schedule_batch
from eagle31.training.teacher_forced import greedy_hits
from tests.data.store.samples import HIDDEN_SIZE, NUM_LAYERS, make_sample
from tests.eagle31.tiny import random_batch, tiny_config, tiny_drafter


def through_fp8(states: Tensor) -> Tensor:
    """Return what becomes of aux states [T, A, H], of which all are kept."""
    padded = torch.cat([states, states[:2]])  # two more tokens, whose aux states nobody reads
    ids, mask = torch.zeros(len(padded), dtype=torch.long), torch.ones(len(padded), dtype=torch.bool)
    return decode(encode(CapturedSample(ids, mask, padded, padded[:, 0]), "fp8")).aux_hidden_states[
        : len(states)
    ]


def samples_of(batch: PackedBatch, codec: str) -> list[CapturedSample]:
    """Encode and decode the documents of a batch."""
    names = [f.name for f in fields(CapturedSample)]
    documents = range(int(batch.document_ids.max()) + 1)
    whole = [{n: getattr(batch, n)[batch.document_ids == i] for n in names} for i in documents]
    return [decode(encode(CapturedSample(**tensors), codec)) for tensors in whole]


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_are_known_beforehand(codec: str, dtype: torch.dtype) -> None:
    for index in range(7):  # with a sample of one token and one of two
        sample = make_sample(index, dtype)
        tensors = encode(sample, codec)
        rows = kept_rows(sample.loss_mask)
        assert {n: len(t) for n, t in tensors.items()} == {n: rows[ROWS_OF[n]] for n in tensors}
        found = sum(tensor.nbytes for tensor in tensors.values())
        assert found == encoded_bytes(codec, rows, StateShape(NUM_LAYERS, HIDDEN_SIZE, dtype))


@pytest.mark.parametrize("seed", range(2))
def test_what_counted_leaves_out_is_read_by_no_loss_and_no_replay(seed: int) -> None:
    config = tiny_config(num_hidden_layers=2)
    whole = random_batch((9, 4, 17, 1, 2, 30), config, seed=seed)
    packed = pack_row(samples_of(whole, "exact"), len(whole.input_ids))
    assert not torch.equal(packed.final_hidden_states, whole.final_hidden_states)
    assert not torch.equal(packed.aux_hidden_states, whole.aux_hidden_states)
    found = []
    for batch in (whole, packed):
        drafter, frozen = tiny_drafter(config)
        loss, sums = rollout_loss(drafter, frozen, batch, num_steps=5, step_decay=0.8)
        loss.backward()
        hits, _ = greedy_hits(drafter, frozen, batch, 5)
        found.append([loss, sums.stacked(), hits, *(p.grad for p in drafter.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("seed", range(2))
def test_no_more_is_kept_than_a_step_reads(seed: int) -> None:
    batch = random_batch((40,), tiny_config(), seed=seed)
    plan = schedule_batch(batch, num_steps=7)
    counted = supervised_final(batch.loss_mask)
    assert torch.nonzero(counted).squeeze(1).tolist() == plan.chunks[0].teacher_rows.tolist()
    assert kept_rows(batch.loss_mask).aux == len(plan.key_rows)
    assert kept_rows(torch.zeros(3, dtype=torch.bool)) == Rows(3, 0, 0)


@pytest.mark.parametrize("codec", CODECS)
def test_slices_are_encoded_as_the_whole_sample_is(codec: str) -> None:
    sample = replace(make_sample(3), loss_mask=torch.arange(14) % 5 > 1)
    whole, supervised = encode(sample, codec), supervised_final(sample.loss_mask)
    ends = [0, 7, 14]
    slices = [CapturedSample(*(x[a:b] for x in vars(sample).values())) for a, b in pairwise(ends)]
    parts = [encode(one, codec, supervised, first) for one, first in zip(slices, ends, strict=False)]
    for name, tensor in whole.items():
        assert torch.equal(torch.cat([part[name].float() for part in parts]), tensor.float()), name


def test_fp8_keeps_three_bits_of_mantissa_at_any_magnitude() -> None:
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.tensor([1e-30, 1e-3, 1.0, 447.9, 448.1, 1e5, 1e30])
    states = (1 + torch.rand(7, 64, generator=generator)) * magnitudes[:, None]
    states[:, ::2] *= -1
    found = through_fp8(torch.stack([states, 1e-4 * states], dim=1))  # a scale for each token and layer
    assert found.dtype == torch.bfloat16
    states = torch.stack([states, 1e-4 * states], dim=1)
    assert ((found.float() - states).abs() / states.abs()).max() <= 2**-4


def test_fp8_decodes_every_code_as_torch_does_and_encodes_it_back() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)  # no nan
    found = through_fp8(codes.float().expand(2, 1, -1))
    assert torch.equal(found[0, 0].float(), codes.float())
    assert torch.equal(through_fp8(found), found)


def test_fp8_keeps_zeros_and_marks_rows_that_are_not_finite() -> None:
    states = torch.ones(4, 8)
    states[0] = 0
    states[1, 3], states[2, 0] = torch.inf, torch.nan
    found = through_fp8(states[:, None])[:, 0]
    assert torch.equal(found[[0, 3]].float(), states[[0, 3]])
    assert found[1:3].isnan().all()


@pytest.mark.parametrize("codec", CODECS)
def test_decoding_into_memory_leaves_nothing_of_what_was_there(codec: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for mask in ([0, 0, 1, 1, 1, 0], [1, 1, 0, 1, 1, 1, 1, 0], [0, 0, 0], [0, 1, 1, 1, 1]):
        states = torch.randn(len(mask), 4, 100_000, generator=generator).bfloat16()
        sample = CapturedSample(
            torch.arange(len(mask)), torch.tensor(mask).bool(), states[:, 1:], states[:, 0]
        )
        tensors = encode(sample, codec)
        expected = decode(tensors)
        used = CapturedSample(*(torch.full_like(tensor, 1) for tensor in vars(expected).values()))
        decode_into(tensors, used)
        assert decoded_dtype(tensors) == expected.aux_hidden_states.dtype
        for name, tensor in vars(expected).items():
            assert torch.equal(getattr(used, name), tensor), name
        kept = kept_rows(sample.loss_mask)
        assert torch.equal(expected.input_ids, sample.input_ids)
        assert not expected.aux_hidden_states[kept.aux :].any()
        close = {"rtol": 0.07 if codec == "fp8" else 0, "atol": 0.01 if codec == "fp8" else 0}
        torch.testing.assert_close(
            expected.aux_hidden_states[: kept.aux], sample.aux_hidden_states[: kept.aux], **close
        )
        read = supervised_final(sample.loss_mask)
        assert not expected.final_hidden_states[~read].any()
        torch.testing.assert_close(
            expected.final_hidden_states[read], sample.final_hidden_states[read], **close
        )
