from pathlib import Path

import torch
from datasets import Dataset, Features, List, Value, load_from_disk

from data.capture.tokens import (
    TokenRows,
    dataset_rows,
    dataset_supervision,
    tokens_fingerprint,
)
from data.store.codec import kept_rows
from eagle31.cost.flops import count_step
from eagle31.training.batch import PackedBatch
from tests.data.target.tiny_target import make_dataset
from tests.eagle31.tiny import tiny_config


def random_masks(num_samples: int) -> Dataset:
    """Return samples of one to nine tokens, with random runs of either mask value."""
    generator = torch.Generator().manual_seed(0)
    lengths = (1 + torch.arange(num_samples) % 9).tolist()
    masks = [(torch.rand(n, generator=generator) < 0.7).tolist() for n in lengths]
    return Dataset.from_dict({"input_ids": [list(range(n)) for n in lengths], "loss_mask": masks})


def test_rows_of_a_dataset_are_those_of_its_samples() -> None:
    dataset = random_masks(1100)
    found = dataset_rows(dataset)
    for row, mask in zip(found.tolist(), dataset["loss_mask"], strict=True):
        assert tuple(row) == kept_rows(torch.tensor(mask))


def test_supervision_is_what_a_step_computes() -> None:
    dataset = random_masks(300)
    for row, mask in zip(dataset_supervision(dataset).tolist(), dataset["loss_mask"], strict=True):
        ids, states = torch.arange(len(mask)), torch.zeros(len(mask), 1, 1)
        batch = PackedBatch(ids, torch.tensor(mask), torch.zeros_like(ids), ids, states, states[:, 0])
        counts = count_step(batch, 1, tiny_config())
        assert row == [counts.keys, counts.rows[0], counts.causal_pairs]


def test_token_rows_come_in_the_requested_order() -> None:
    dataset = make_dataset()
    indices = [5, 0, 5, 11]
    for chosen in (dataset, dataset.select(range(11, -1, -1))):
        read = TokenRows(chosen).read(indices)
        for index, (ids, mask) in zip(indices, read, strict=True):
            assert ids.dtype == torch.int64
            assert mask.dtype == torch.bool
            assert ids.tolist() == chosen[index]["input_ids"]
            assert mask.tolist() == chosen[index]["loss_mask"]


def test_tokens_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    dataset = make_dataset()
    own = tokens_fingerprint(dataset)
    dataset.save_to_disk(str(tmp_path / "saved"))
    assert tokens_fingerprint(load_from_disk(str(tmp_path / "saved"))) == own
    as_written = Features({"input_ids": List(Value("int32")), "loss_mask": List(Value("bool"))})
    assert tokens_fingerprint(dataset.cast(as_written)) == own
    rows = dataset.to_list()
    masked = [{**rows[0], "loss_mask": [not one for one in rows[0]["loss_mask"]]}, *rows[1:]]
    # The same tokens in the same order, divided differently.
    head, tail = rows[0]["input_ids"][:-1], [*rows[0]["input_ids"][-1:], *rows[1]["input_ids"]]
    masks = rows[0]["loss_mask"][:-1], [*rows[0]["loss_mask"][-1:], *rows[1]["loss_mask"]]
    divided = [
        {"input_ids": head, "loss_mask": masks[0]},
        {"input_ids": tail, "loss_mask": masks[1]},
        *rows[2:],
    ]
    others = [dataset.select(range(11)), dataset.select([1, 0, *range(2, 12)])]
    others += [Dataset.from_list(masked), Dataset.from_list(divided)]
    assert len({own, *map(tokens_fingerprint, others)}) == 5
