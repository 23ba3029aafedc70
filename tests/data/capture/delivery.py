"""A store of random states, and online delivery of the same states."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from datasets import Dataset

from data.capture.arriving import ArrivingStates
from data.capture.transport.protocol import Producer, StateRequest
from data.capture.transport.spool import Spool, file_bytes, open_spool
from data.samples import CapturedSample, StateShape
from data.store import HiddenStateStore
from data.store.index import write_manifest
from data.store.writer import StoreWriter

SHAPE = StateShape(num_aux_layers=3, hidden_size=256, dtype=torch.float32)
CODEC = "exact"
NUM_SAMPLES = 30


def random_dataset(num_samples: int = NUM_SAMPLES) -> Dataset:
    """Return samples of 5 to 24 tokens, of which the first two are the prompt."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(5, 25, (num_samples,), generator=generator).tolist()
    ids = [torch.randint(100_000, (length,), generator=generator).tolist() for length in lengths]
    masks = [[False, False] + [True] * (length - 2) for length in lengths]
    return Dataset.from_dict({"input_ids": ids, "loss_mask": masks})


def random_states(input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random states that depend on the tokens only."""
    generator = torch.Generator().manual_seed(int(input_ids.sum()))
    aux = torch.randn(len(input_ids), SHAPE.num_aux_layers, SHAPE.hidden_size, generator=generator)
    return aux, torch.randn(len(input_ids), SHAPE.hidden_size, generator=generator)


def write_store(directory: Path, dataset: Dataset) -> HiddenStateStore:
    with StoreWriter(directory, "test", CODEC, shard_tokens=100) as writer:
        for index, row in enumerate(dataset.with_format("torch")):
            states = random_states(row["input_ids"])
            writer.append(index, CapturedSample(row["input_ids"], row["loss_mask"], *states))
    write_manifest(directory, {"codec": CODEC})
    return HiddenStateStore(directory)


class PromptProducer:
    """A producer in this process that puts requested states at once, or those that `put` selects."""

    def __init__(self, spool: Spool, put: Callable[[StateRequest], bool] = lambda _: True) -> None:
        self.num_restarts = 0
        self.spool = spool
        self.put = put
        self.refused: dict[str, str] = {}
        self.requests: list[StateRequest] = []
        self.most_bytes = 0

    def request(self, request: StateRequest) -> bool:
        self.requests.append(request)
        if self.put(request):
            self.spool.put(request, *random_states(request.input_ids))
        self.most_bytes = max(self.most_bytes, used_bytes(self.spool))
        return True

    def received(self, key: str) -> None: ...

    def refusals(self) -> dict[str, str]:
        refused, self.refused = self.refused, {}
        return refused

    def close(self) -> None: ...


def used_bytes(spool: Spool) -> int:
    """Return the size of the directory, whose files may disappear in the meantime."""
    total = 0
    for path in spool.directory.iterdir():
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def sample_bytes(loss_mask: torch.Tensor) -> int:
    return file_bytes(CODEC, loss_mask, *vars(SHAPE).values())


def states_from(
    dataset: Dataset, producer: Producer, spool: Spool, spool_bytes: int = 10**8
) -> ArrivingStates:
    return ArrivingStates(
        dataset,
        producer,
        spool,
        shape=SHAPE,
        sample_bytes=sample_bytes,
        spool_gb=spool_bytes / 1e9,
        name="test",
    )


@contextmanager
def open_memory(name: str) -> Iterator[Spool]:
    with open_spool(None, name, CODEC, 10**8) as spool:
        yield spool
