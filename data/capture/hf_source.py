"""The samples of a dataset with their states, as transformers gives them in this process."""

from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import nullcontext

import torch
from datasets import Dataset
from torch import Tensor

from data.capture.hf import HiddenStateCapture
from data.capture.tokens import TokenRows, dataset_lengths
from data.samples import CapturedSample
from data.store.codec import decode, encode
from eagle31.errors import UserError


class TransformersStates:
    """The samples of a dataset with their states.

    A `HiddenStateSource`, which runs the target when training reads samples, in the thread that reads.

    Args:
        dataset: columns input_ids and loss_mask.
        codec: what a store would keep of the states; training reads the same as from a store.
        batch_tokens: the most tokens in one forward pass, with padding.
    """

    def __init__(self, dataset: Dataset, capture: HiddenStateCapture, codec: str, batch_tokens: int) -> None:
        self.lengths = dataset_lengths(dataset)
        self._tokens, self._capture = TokenRows(dataset), capture
        self._codec, self._batch_tokens = codec, batch_tokens
        on_gpu = capture.device.type == "cuda"
        # In a stream of its own it runs next to the kernels of training.
        self._stream = torch.cuda.Stream(capture.device) if on_gpu else None

    def captured(
        self, indices: Sequence[int], missing: Collection[int]
    ) -> Generator[tuple[int, CapturedSample], None, None]:
        """Yield captured samples, the longest first. Samples of similar length are captured together.

        Args:
            indices: those that are divided into batches.
            missing: those of them that are captured. A batch that has some of them runs with all of its
                samples, because other batches round differently: a resumed capture has the states of an
                uninterrupted one.
        """
        wanted = set(missing)
        for places in batches_by_length([self.lengths[index] for index in indices], self._batch_tokens):
            batch = [indices[place] for place in places]
            if wanted.isdisjoint(batch):
                continue
            rows = self._tokens.read(batch)
            for index, row, states in zip(batch, rows, _states(self._capture, rows), strict=True):
                if index in wanted:
                    yield index, CapturedSample(*row, *states)

    def get_many(self, indices: Sequence[int]) -> list[CapturedSample]:
        """Capture samples and return them in host memory."""
        samples: dict[int, CapturedSample] = {}
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for index, sample in self.captured(indices, indices):
                encoded = encode(sample, self._codec)
                samples[index] = decode({name: tensor.cpu() for name, tensor in encoded.items()})
        return [samples[index] for index in indices]


def batches_by_length(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield batches of indices, the longest first, with at most `batch_tokens` tokens including padding.

    A batch has at least one index.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _states(
    capture: HiddenStateCapture, rows: Sequence[tuple[Tensor, Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    """Return the states of each row; a batch that exceeds the memory is divided."""
    try:
        return capture.capture([input_ids for input_ids, _ in rows])
    except torch.OutOfMemoryError as error:
        if len(rows) == 1:
            remedy = (
                f"A sample of {len(rows[0][0]):,} tokens exceeds the memory of {capture.device}: set "
                "capture=vllm, or target.device_map=auto, or lower data.max_tokens."
            )
            raise UserError("capture.source", "hf", remedy) from error
    half = len(rows) // 2
    return _states(capture, rows[:half]) + _states(capture, rows[half:])
