import threading
from collections.abc import Sequence

import pytest
import torch

from data.batches.loader import RowLoader, RowPosition, SourceStats, check_divisible
from data.batches.rows import pack_row
from data.samples import CapturedSample, StateShape
from eagle31.errors import UserError

ROW_TOKENS, NUM_SAMPLES = 64, 40


class ListSource:
    """A source of samples whose values encode the sample and the token."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.lengths = [3 + 7 * i % 30 for i in range(num_samples)]
        self.requests: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> CapturedSample:
        ids = 1000 * (index + 1) + torch.arange(self.lengths[index])
        states = ids[:, None].float() + torch.tensor([0.0, 0.25])
        return CapturedSample(ids, ids % 2 == 0, torch.stack([states, -states, states], dim=1), states)

    def get_many(self, indices: Sequence[int]) -> list[CapturedSample]:
        self.requests.append(list(indices))
        return [self[i] for i in indices]


def _loader(rank: int = 0, world_size: int = 1, **changes) -> RowLoader:
    options = {"row_tokens": ROW_TOKENS, "rows_per_step": 4, "seed": 0} | changes
    return RowLoader(ListSource(), rank=rank, world_size=world_size, **options)


def test_a_row_concatenates_its_samples_and_is_padded() -> None:
    source = ListSource()
    batch = pack_row([source[1], source[2]], num_tokens=32)
    n, m = source.lengths[1], source.lengths[2]
    used = n + m
    assert batch.input_ids.tolist() == [
        *source[1].input_ids.tolist(),
        *source[2].input_ids.tolist(),
        *[0] * (32 - used),
    ]
    assert batch.document_ids.tolist() == [0] * n + [1] * m + [-1] * (32 - used)
    assert batch.position_ids[:used].tolist() == [*range(n), *range(m)]
    assert not batch.loss_mask[used:].any()
    assert batch.loss_mask.dtype == torch.bool
    assert torch.equal(batch.aux_hidden_states[n:used], source[2].aux_hidden_states)
    assert torch.equal(batch.final_hidden_states[:n], source[1].final_hidden_states)
    assert batch.aux_hidden_states.shape == (32, 3, 2)
    assert not batch.final_hidden_states[used:].any()


def test_costs_move_rows_between_ranks_only() -> None:
    costs = [float(index % 7) ** 3 for index in range(NUM_SAMPLES)]
    alone, without = _loader(costs=costs), _loader()
    ranks = [_loader(rank, 2, costs=costs) for rank in range(2)]
    moved = False
    for step in range(3):
        assert alone.rows(step) == without.rows(step)
        rows = [loader.rows(step) for loader in ranks]
        assert [len(of_rank) for of_rank in rows] == [2, 2]
        assert sorted(rows[0] + rows[1]) == sorted(alone.rows(step))
        totals = sorted(sum(costs[sample] for row in of_rank for sample in row) for of_rank in rows)
        strided = [alone.rows(step)[rank::2] for rank in range(2)]
        before = sorted(sum(costs[sample] for row in of_rank for sample in row) for of_rank in strided)
        assert totals[1] <= before[1]
        moved |= totals != before
    assert moved


def test_rows_are_padded_to_a_multiple_within_row_tokens() -> None:
    lengths = [len(batch.input_ids) for step in range(4) for batch in _loader(pad_multiple=24).batches(step)]
    assert set(lengths) <= {24, 48, 64}


def test_a_loader_continues_in_the_order_of_another() -> None:
    rows_per_step, whole = 3, _loader(rows_per_step=1)
    number = 5 + 2 * whole.rows_per_epoch
    position = RowPosition(7, *whole.position(number))
    assert (position.epoch, position.row) == (2, 5)
    rest = _loader(rows_per_step=rows_per_step, begin=position)
    for step in range(7, 11):
        first = number + (step - 7) * rows_per_step
        assert rest.rows(step) == [whole.rows(first + index)[0] for index in range(rows_per_step)]
        assert rest.step_samples(step) == sorted(i for row in rest.rows(step) for i in row)


def test_the_order_depends_only_on_seed_and_epoch() -> None:
    world_size = 2
    ranks = [_loader(rank, world_size) for rank in range(world_size)]
    steps = int(2.5 * ranks[0].rows_per_epoch / 4)
    rows = [[ranks[i % world_size].rows(step)[i // world_size] for i in range(4)] for step in range(steps)]
    assert rows == [_loader().rows(step) for step in range(steps)]
    assert rows != [_loader(seed=1).rows(step) for step in range(steps)]
    every = [row for step in rows for row in step]
    first, second = (every[i * ranks[0].rows_per_epoch :][: ranks[0].rows_per_epoch] for i in range(2))
    assert sorted(i for row in first for i in row) == sorted(i for row in second for i in row)
    assert first != second


def test_steps_are_read_ahead_and_only_once() -> None:
    loader = _loader(steps_ahead=3)
    source = loader.source
    for step in range(3):
        loader.batches(step)
    assert [step for step, _ in loader._ahead] == [3, 4, 5]
    loader._ahead[-1][1].result()
    assert source.requests == [[i for row in loader.rows(step) for i in row] for step in range(6)]


class OrderedListSource(ListSource):
    """A source that checks that samples are read in the announced order."""

    def __init__(self) -> None:
        super().__init__()
        self.expected: list[int] = []
        self.most_ahead = 0
        self.gave_up = False
        self.arriving = threading.Event()
        self.arriving.set()

    def expect(self, indices: Sequence[int]) -> None:
        self.expected += indices

    def get_many(self, indices: Sequence[int]) -> list[CapturedSample]:
        self.most_ahead = max(self.most_ahead, len(self.expected))
        assert self.arriving.wait()
        announced, self.expected = self.expected[: len(indices)], self.expected[len(indices) :]
        assert announced == list(indices)
        return super().get_many(indices)

    def collect_stats(self) -> SourceStats:
        return SourceStats(len(self.expected), 0.0, 0.0, 0)

    def stop(self) -> None:
        self.arriving.set()


def test_steps_are_announced_an_epoch_ahead_to_an_ordered_source() -> None:
    source = OrderedListSource()
    loader = RowLoader(
        source, row_tokens=ROW_TOKENS, rows_per_step=2, rank=1, world_size=2, seed=0, steps_announced=100
    )
    epoch = loader.rows_per_epoch // 2
    assert loader.steps_announced == epoch
    for step in range(5, 5 + 3 * epoch):
        loader.batches(step)
    loader.close()
    assert source.most_ahead > NUM_SAMPLES / 3
    assert loader.collect_stats() is not None
    assert _loader().collect_stats() is None


def test_close_stops_a_wait_for_states() -> None:
    source = OrderedListSource()
    source.arriving.clear()
    loader = RowLoader(source, row_tokens=ROW_TOKENS, rows_per_step=2, seed=0)
    loader.read_ahead(0)
    loader.close()
    assert source.arriving.is_set()


def test_samples_without_tokens_leave_no_trace() -> None:
    source = ListSource()
    empty = CapturedSample(*(value[:0] for value in vars(source[0]).values()))
    with_empty = pack_row([empty, source[1], empty, source[2]], num_tokens=64)
    for name, value in vars(pack_row([source[1], source[2]], num_tokens=64)).items():
        assert torch.equal(getattr(with_empty, name), value)
    alone = pack_row([empty], num_tokens=16)
    assert alone.document_ids.tolist() == [-1] * 16
    assert not alone.loss_mask.any()
    assert alone.aux_hidden_states.shape == (16, 3, 2)


@pytest.mark.parametrize(("world_size", "costs"), [(3, [1.0] * 60), (6, None)])
def test_ranks_that_cannot_share_the_rows_equally_have_empty_ones(
    world_size: int, costs: list[float] | None
) -> None:
    whole = _loader()
    shape = StateShape.of(ListSource()[0].aux_hidden_states)
    loaders = [
        _loader(rank=rank, world_size=world_size, costs=costs, state_shape=shape)
        for rank in range(world_size)
    ]
    for step in range(3):
        rows = [row for loader in loaders for row in loader.batches(step)]
        assert len(rows) == 6
        empty = [row for row in rows if not row.input_ids.any()]
        filled = [row for row in rows if row.input_ids.any()]
        assert len(empty) == 2
        assert not any(bool(row.loss_mask.any()) or bool(row.aux_hidden_states.any()) for row in empty)
        assert {row.aux_hidden_states.shape[1:] for row in rows} == {rows[0].aux_hidden_states.shape[1:]}
        trained = sorted(row.input_ids.tolist() for row in filled)
        assert trained == sorted(row.input_ids.tolist() for row in whole.batches(step))


def test_rows_are_divided_equally() -> None:
    check_divisible(16, 8)
    with pytest.raises(UserError, match=r"train\.rows_per_step=12: .* 8, such as 16"):
        check_divisible(12, 8)


def test_too_few_rows_for_a_step_are_a_user_error() -> None:
    with pytest.raises(UserError, match=r"train\.rows_per_step=100: The data fills"):
        _loader(rows_per_step=100)
