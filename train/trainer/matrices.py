"""The matrices that Muon updates: which rank orthogonalizes which, and what that takes."""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from eagle31.kernels.newton_schulz import orthogonalization_elements, orthogonalization_flops, orthogonalize
from train.trainer.engine_state import Fragment

# Parts of the head, whose rows belong to tokens.
_OF_TOKENS = ("lm_head.weight", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight")


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether Muon updates this weight of the drafter; AdamW updates the others.

    Muon is for matrices between hidden states. A norm's weight is a vector. A row of the draft head or of the
    Markov head belongs to one token, and its gradient is as frequent as the token, which AdamW evens out.

    A weight that has several projections, as DeepSeek's checkpoints have, counts as one matrix.

    Source: Keller Jordan et al., Muon: an optimizer for hidden layers in neural networks (2024).
    """
    return len(shape) == 2 and name not in _OF_TOKENS


# Matrices of one shape are orthogonalized together up to this number of elements; larger ones one by one.
BATCH_ELEMENTS = 2**24


def rounds(shapes: Sequence[Sequence[int]], num_owners: int) -> list[list[list[int]]]:
    """Return the indices of the matrices that each owner orthogonalizes together, by round, then by owner.

    Each matrix, the one with the most FLOPs first, goes to the owner with the fewest FLOPs so far. In each
    round an owner has one batch of matrices of the same shape, which may be empty. So the memory of a round
    does not grow with the number of matrices.
    """
    flops = [orthogonalization_flops(*shape) for shape in shapes]
    loads = [0] * num_owners
    batches: list[list[list[int]]] = [[] for _ in range(num_owners)]
    for index in sorted(range(len(shapes)), key=lambda index: -flops[index]):
        owner = loads.index(min(loads))
        loads[owner] += flops[index]
        for batch in batches[owner]:
            size = (len(batch) + 1) * shapes[index][0] * shapes[index][1]
            if list(shapes[batch[0]]) == list(shapes[index]) and size <= BATCH_ELEMENTS:
                batch.append(index)
                break
        else:
            batches[owner].append([index])
    num_rounds = max(map(len, batches))
    return [[one[number] if number < len(one) else [] for one in batches] for number in range(num_rounds)]


class WholeMatrices:
    """Orthogonalizes whole matrices of which every rank has a fragment, or all.

    Fragments travel to the matrix's owner in one all-to-all operation per round, and back in another. Where
    every rank has the whole matrix, its owner broadcasts the result.

    Args:
        shapes: of the matrices.
        fragments: by rank, then by matrix. None: every rank has all matrices.
        device: where matrices are orthogonalized and exchanged.
        dtype: in which they are.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        fragments: Sequence[Sequence[Fragment]] | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.shapes = shapes
        self.fragments = fragments
        self.device, self.dtype = device, dtype
        self.rank, self.num_ranks = _rank_and_size()
        self.rounds = rounds(shapes, self.num_ranks)

    @property
    def own_fragments(self) -> Sequence[Fragment]:
        """This rank's fragments, by matrix."""
        assert self.fragments is not None
        return self.fragments[self.rank]

    def orthogonalized(self, pieces: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield each matrix's index with this rank's fragment of the orthogonal matrix. Every rank calls.

        Args:
            pieces: this rank's fragment of each matrix, float [length].
        """
        step = self._broadcast if self.fragments is None else self._exchange
        for batches in self.rounds:
            yield from step(pieces, batches)

    def _broadcast(self, pieces: Sequence[Tensor], batches: list[list[int]]) -> Iterator[tuple[int, Tensor]]:
        own = batches[self.rank]
        updates = self._orthogonalize(self._packed(pieces, own), own) if own else None
        for owner, batch in enumerate(batches):
            if not batch:
                continue
            if owner == self.rank:
                assert updates is not None
                found = updates
            else:
                found = self._empty(len(batch) * self.shapes[batch[0]].numel())
            if self.num_ranks > 1:
                dist.broadcast(found, owner)
            yield from zip(batch, found.view(len(batch), -1), strict=True)

    def _exchange(self, pieces: Sequence[Tensor], batches: list[list[int]]) -> Iterator[tuple[int, Tensor]]:
        assert self.fragments is not None
        mine, own = self.own_fragments, batches[self.rank]
        sent = [sum(mine[index].length for index in batch) for batch in batches]  # by owner
        owned = [sum(one[index].length for index in own) for one in self.fragments]  # by rank
        everyone = [index for batch in batches for index in batch]
        received = self._all_to_all(self._packed(pieces, everyone), sent, owned)
        # By rank, then by matrix; an element's place in the batch is known to all.
        places = [
            slice(row * size + one[index].start, row * size + one[index].start + one[index].length)
            for one in self.fragments
            for row, index in enumerate(own)
            for size in [self.shapes[index].numel()]
        ]
        matrices = self._empty(sum(self.shapes[index].numel() for index in own))
        for place, fragment in zip(places, _split(received, places), strict=True):
            matrices[place] = fragment
        updates = self._orthogonalize(matrices, own) if own else matrices
        for place, fragment in zip(places, _split(received, places), strict=True):
            fragment.copy_(updates[place])
        del matrices, updates
        returned = self._all_to_all(received, owned, sent)
        lengths = [mine[index].length for index in everyone]
        yield from zip(everyone, returned.split(lengths), strict=True)

    def _orthogonalize(self, matrices: Tensor, batch: list[int]) -> Tensor:
        """Orthogonalize matrices of one shape, flattened and one after the other."""
        return orthogonalize(matrices.view(len(batch), *self.shapes[batch[0]])).reshape(-1)

    def _packed(self, pieces: Sequence[Tensor], indices: list[int]) -> Tensor:
        packed = self._empty(sum(pieces[index].numel() for index in indices))
        for index, place in zip(
            indices, packed.split([pieces[index].numel() for index in indices]), strict=True
        ):
            place.copy_(pieces[index])
        return packed

    def _all_to_all(self, values: Tensor, sent: list[int], received: list[int]) -> Tensor:
        if self.num_ranks == 1:
            return values
        found = self._empty(sum(received))
        dist.all_to_all_single(found, values, received, sent)
        return found

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=self.dtype, device=self.device)


def _split(values: Tensor, places: list[slice]) -> tuple[Tensor, ...]:
    return values.split([place.stop - place.start for place in places])


def _rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def matrix_shapes(tensors: Mapping[str, Sequence[int]]) -> list[Sequence[int]]:
    """Return the shapes of the weights that Muon updates, from those of all trained weights by name."""
    return [shape for name, shape in tensors.items() if is_matrix(name, shape)]


def orthogonalization_bytes(
    shapes: Sequence[Sequence[int]], *, num_ranks: int, partitioned: bool, itemsize: int
) -> int:
    """Return the memory of exchanging and orthogonalizing matrices, at its peak.

    It is that of the largest batch: the received fragments, the whole matrices, and the iteration's tensors.

    Args:
        partitioned: whether the matrices are split among the ranks.
        itemsize: bytes of an element in which matrices are orthogonalized.
    """
    largest = 0
    for batch in (batch for batches in rounds(shapes, num_ranks) for batch in batches if batch):
        rows, columns = shapes[batch[0]]
        held = (2 if partitioned else 1) * rows * columns + orthogonalization_elements(rows, columns)
        largest = max(largest, len(batch) * held)
    return largest * itemsize
