"""Random samples and stores of them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from data.samples import CapturedSample
from data.store.codec import decode, encode
from data.store.index import claim, write_manifest
from data.store.shards import FinishedShards
from data.store.writer import StoreWriter

LENGTHS = [5, 9, 3, 14, 2, 1, 8]
NUM_LAYERS, HIDDEN_SIZE = 3, 8
EXACT = "exact"


def make_sample(index: int, dtype: torch.dtype = torch.bfloat16) -> CapturedSample:
    generator = torch.Generator().manual_seed(index)
    length = LENGTHS[index % len(LENGTHS)]
    return CapturedSample(
        input_ids=torch.randint(100_000, (length,), generator=generator),
        loss_mask=torch.rand(length, generator=generator) < 0.6,
        aux_hidden_states=torch.randn(length, NUM_LAYERS, HIDDEN_SIZE, generator=generator).to(dtype),
        final_hidden_states=torch.randn(length, HIDDEN_SIZE, generator=generator).to(dtype),
    )


def settings(num_samples: int = len(LENGTHS), codec: str = EXACT, **changes: object) -> dict:
    return {
        "target": "tiny",
        "target_revision": None,
        "dtype": "bfloat16",
        "aux_layer_ids": [0, 2, 5],
        "codec": codec,
        "tokens_fingerprint": "abc",
        "dataset_samples": num_samples,
    } | changes


def append_all(
    directory: Path, ids: Iterable[int], name: str = "a", codec: str = EXACT, shard_tokens: int = 15
) -> None:
    with StoreWriter(directory, name, codec, shard_tokens) as writer:
        for sample_id in ids:
            writer.append(sample_id, make_sample(sample_id))


def write_store(directory: Path, codec: str = EXACT, **changes: Any) -> None:
    """Write the seven samples by two writers, neither of them in order."""
    own = settings(codec=codec, **changes)
    claim(directory, own)
    append_all(directory, [6, 1, 4, 0], "a", codec)
    append_all(directory, [5, 3, 2], "b", codec)
    write_manifest(FinishedShards(directory), own)


def encoded(index: int, codec: str = EXACT) -> CapturedSample:
    """Return a sample as a store gives it back."""
    return decode(encode(make_sample(index), codec))


def assert_equal(found: CapturedSample, expected: CapturedSample) -> None:
    for name, tensor in vars(expected).items():
        assert getattr(found, name).dtype == tensor.dtype
        assert torch.equal(getattr(found, name), tensor), name


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def captured_ids(directory: Path) -> set[int]:
    """Return the ids of the samples in finished shards."""
    return {sample_id for record in FinishedShards(directory).records() for sample_id in record.sample_ids}
