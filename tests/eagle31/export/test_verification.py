import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle31.errors import UserError
from eagle31.export.verification import (
    MAX_ROWS,
    MAX_STATE_BYTES,
    Probe,
    TrainingRecord,
    make_probe,
    probe_piece,
    read_probe,
    read_record,
    replay_probe,
    tensor_hash,
    write_verification,
)
from eagle31.training.batch import PackedBatch
from eagle31.training.supervision import supervised_drafts
from tests.eagle31.tiny import MLA, random_batch, tiny_config, tiny_drafter

STEPS = 3


def record(**changes: Any) -> TrainingRecord:
    return TrainingRecord(tiny_config(**changes), "bfloat16", "vllm", 7, {"model": "x"}, {"fc.weight": "0"})


def a_probe() -> tuple[Probe, torch.nn.Module, torch.Tensor]:
    drafter, frozen = tiny_drafter(tiny_config(), torch.float32)
    piece = probe_piece(random_batch((60,), drafter.config, dtype=torch.float32), STEPS)
    assert piece is not None
    return make_probe(drafter, frozen.embed_tokens, piece, STEPS), drafter, frozen.embed_tokens


def test_record_and_probe_are_read_back(tmp_path: Path) -> None:
    probe, _, _ = a_probe()
    write_verification(tmp_path, record(), probe)
    # vLLM loads every safetensors file next to config.json as weights.
    assert not list(tmp_path.glob("*.safetensors"))
    assert read_record(tmp_path) == record()
    read = read_probe(tmp_path)
    assert read is not None
    for name in ("rows", "top_ids", "top_logits", "logsumexp"):
        assert torch.equal(getattr(read, name), getattr(probe, name)), name
    for field in fields(PackedBatch):
        assert torch.equal(getattr(read.batch, field.name), getattr(probe.batch, field.name)), field.name


def test_a_record_of_mla_is_read_back(tmp_path: Path) -> None:
    write_verification(tmp_path, record(**MLA), None)
    assert read_record(tmp_path) == record(**MLA)


def test_a_published_checkpoint_has_no_record(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    assert read_probe(tmp_path) is None


@pytest.mark.parametrize("change", [{"format": 2}, {"config": {}}])
def test_a_damaged_record_is_refused(tmp_path: Path, change: dict) -> None:
    write_verification(tmp_path, record(), None)
    path = tmp_path / "verification" / "record.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=r"verification/record\.json"):
        read_record(tmp_path)


def test_replay_of_the_same_drafter_has_no_difference() -> None:
    probe, drafter, embed_tokens = a_probe()
    assert replay_probe(probe, drafter, embed_tokens).largest == 0.0


def test_replay_shows_the_step_where_a_drafter_differs() -> None:
    probe, drafter, embed_tokens = a_probe()
    drafter.config = replace(drafter.config, norm_output=False)
    difference = replay_probe(probe, drafter, embed_tokens)
    assert difference.largest > 0.01
    assert difference.step > 0  # the first step has nothing fed back


def test_replay_of_nan_is_a_difference() -> None:
    probe, drafter, embed_tokens = a_probe()
    drafter.lm_head.weight.data[0, 0] = float("nan")
    assert replay_probe(probe, drafter, embed_tokens).largest == float("inf")


def test_a_piece_is_small_and_has_supervised_drafts() -> None:
    wide = tiny_config(target_hidden_size=7168)
    batch = random_batch((300,), wide, dtype=torch.float32)
    batch = replace(batch, loss_mask=torch.arange(300) >= 200)
    piece = probe_piece(batch, STEPS)
    assert piece is not None
    states = (piece.aux_hidden_states, piece.final_hidden_states)
    assert sum(one.numel() * one.element_size() for one in states) <= MAX_STATE_BYTES
    assert supervised_drafts(piece.loss_mask, piece.document_ids, STEPS).all(dim=1).any()
    assert piece.position_ids[0] == 0
    config = tiny_config()
    long = replace(random_batch((300,), config, dtype=torch.float32), loss_mask=torch.ones(300).bool())
    whole = probe_piece(long, STEPS)
    assert whole is not None
    drafter, frozen = tiny_drafter(config, torch.float32)
    assert len(make_probe(drafter, frozen.embed_tokens, whole, STEPS).rows) == MAX_ROWS


def test_no_piece_without_an_answer() -> None:
    batch = random_batch((20,), tiny_config(), dtype=torch.float32)
    assert probe_piece(replace(batch, loss_mask=torch.zeros(20).bool()), STEPS) is None


def test_hashes_are_of_bytes() -> None:
    ones = torch.ones(3, 2, dtype=torch.bfloat16)
    assert tensor_hash(ones) == tensor_hash(ones.T.contiguous().T)
    assert tensor_hash(ones) != tensor_hash(ones.float())
    assert tensor_hash(torch.tensor(True)) == tensor_hash(torch.tensor([True]))
