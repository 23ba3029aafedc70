"""The training step on a GPU: it runs, its gradients have their shapes, and the host waits for nothing."""

import warnings
from typing import Any

import pytest
import torch

from eagle31.kernels import flash_support, packed_attention
from eagle31.training.drift import choose_rows, measure_drift
from eagle31.training.objectives import Loss, Objective
from eagle31.training.teacher_forced import greedy_hits
from tests.pretended_gpu.pretended_gpu import CUDA, PretendedGpu
from tests.pretended_gpu.steps import NUM_STEPS, configuration, drafter_on_gpu, host_batch, step

aten = torch.ops.aten
BF16, FP32 = torch.bfloat16, torch.float32
# Each pair of values occurs. attention, dtype, pruned, layers, metrics, checkpointing
CASES = [
    ("gqa", BF16, True, 1, False, False),
    ("gqa", FP32, False, 2, True, True),
    ("mla", BF16, False, 2, False, True),
    ("mla", FP32, True, 1, True, False),
    ("mla", BF16, True, 2, True, False),
    ("gqa", BF16, False, 1, True, True),
    ("gqa", FP32, True, 2, False, False),
]


@pytest.fixture(autouse=True)
def forget_warnings() -> None:
    flash_support.warn_once.cache_clear()


@pytest.mark.parametrize(("attention", "dtype", "pruned", "num_layers", "metrics", "checkpointed"), CASES)
@pytest.mark.filterwarnings("ignore:.*matrix products")
def test_a_step_never_waits(
    attention: str, dtype: torch.dtype, pruned: bool, num_layers: int, metrics: bool, checkpointed: bool
) -> None:
    config = configuration(attention, pruned=pruned, num_layers=num_layers)
    with PretendedGpu() as gpu:
        drafter, frozen = drafter_on_gpu(config, dtype)
        batch = host_batch(config, dtype)
        options: dict[str, Any] = {"with_metrics": metrics, "activation_checkpointing": checkpointed}
        with gpu.no_waiting():
            sums = step(drafter, frozen, batch, **options)
        assert sums.stacked().shape == (6, NUM_STEPS)
        for name, parameter in drafter.named_parameters():
            assert parameter.grad is not None, name
            assert (parameter.grad.shape, parameter.grad.dtype) == (parameter.shape, dtype), name
        flash = [op for op in gpu.operations if "_flash_attention" in str(op)]
        assert bool(flash) == (dtype is BF16)
        atomic = {aten.index_add_.default, aten.scatter_add_.default} & set(gpu.operations)
        assert not atomic, "the order of atomic additions changes from run to run"


class RecordedWindows:
    """PyTorch's operators; the windows of the flash kernel's calls are recorded."""

    def __init__(self) -> None:
        self.forward: list[tuple[Any, Any]] = []
        self.backward: list[tuple[Any, Any]] = []

    def _flash_attention_forward(self, *args: Any, **settings: Any) -> Any:
        self.forward.append((settings.get("window_size_left"), settings.get("window_size_right")))
        return aten._flash_attention_forward(*args, **settings)

    def _flash_attention_backward(self, *args: Any, **settings: Any) -> Any:
        self.backward.append((settings.get("window_size_left"), settings.get("window_size_right")))
        return aten._flash_attention_backward(*args, **settings)


@pytest.mark.parametrize(
    ("window", "num_layers", "expected"),
    [
        (7, 1, [(6, 0), (5, 0), (4, 0)]),
        (7, 2, [(6, 0), (6, 0), (5, 0), (5, 0), (4, 0), (4, 0)]),
        (2, 1, [(1, 0), (0, 0)]),  # the third step reads its rollout keys alone
        (1000, 1, [(None, None)] * 3),
        (None, 1, [(None, None)] * 3),
    ],
)
def test_the_kernel_is_given_each_steps_window(
    window: int | None, num_layers: int, expected: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts the keys before the query's own; rollout keys are a part of the window."""
    kernels = RecordedWindows()
    monkeypatch.setattr(packed_attention, "kernels", kernels)
    config = configuration("gqa", num_layers=num_layers, window=window)
    with PretendedGpu() as gpu:
        drafter, frozen = drafter_on_gpu(config, BF16)
        batch = host_batch(config, BF16)
        with gpu.no_waiting():
            step(drafter, frozen, batch)
    # One call for each segment of keys that the documents' turns have.
    assert list(dict.fromkeys(kernels.forward)) == list(dict.fromkeys(expected))
    assert sorted(kernels.backward, key=str) == sorted(kernels.forward, key=str)
    assert len(kernels.forward) % len(expected) == 0


OBJECTIVES = [Objective(loss, count_outside_vocab=False) for loss in Loss]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_loss_waits(objective: Objective) -> None:
    config = configuration("gqa")
    with PretendedGpu() as gpu:
        drafter, frozen = drafter_on_gpu(config, BF16)
        batch = host_batch(config, BF16)
        with gpu.no_waiting():
            step(drafter, frozen, batch, objective=objective)


@pytest.mark.parametrize(
    ("name", "capability", "dtype", "head_dim", "reason"),
    [
        ("NVIDIA H100", (9, 0), BF16, 128, None),
        ("NVIDIA A100", (8, 0), torch.float16, 6, None),  # padded
        ("NVIDIA H100", (9, 0), BF16, 256, None),
        ("NVIDIA B200", (10, 0), BF16, 192, None),
        ("NVIDIA L40", (8, 9), BF16, 256, None),
        ("Tesla T4", (7, 5), torch.float16, 128, "compute capability 8.0, and the card has 7.5"),
        ("Tesla V100", (7, 0), BF16, 128, "compute capability 8.0, and the card has 7.0"),
        ("NVIDIA H100", (9, 0), FP32, 128, "not in float32"),
        ("NVIDIA H100", (9, 0), BF16, 288, "heads of at most 256, not 288"),
        ("NVIDIA GeForce RTX 4090", (8, 9), BF16, 224, "cannot train heads of 224"),
        ("NVIDIA GeForce RTX 5090", (12, 0), BF16, 200, "cannot train heads of 200"),
    ],
)
def test_the_kernel_is_taken_where_the_card_has_it(
    name: str, capability: tuple[int, int], dtype: torch.dtype, head_dim: int, reason: str | None
) -> None:
    with PretendedGpu(capability, name):
        found = flash_support.flash_obstacle(CUDA, dtype, head_dim)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(("dtype", "capability"), [(FP32, (9, 0)), (BF16, (7, 5))])
def test_a_notice_names_the_card_once(dtype: torch.dtype, capability: tuple[int, int]) -> None:
    config = configuration("gqa")
    with PretendedGpu(capability, "a card") as gpu, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        drafter, frozen = drafter_on_gpu(config, dtype)
        for _ in range(2):
            step(drafter, frozen, host_batch(config, dtype))
        assert not [op for op in gpu.operations if "_flash_attention" in str(op)]
    notices = [str(one.message) for one in caught if "matrix products" in str(one.message)]
    assert len(notices) == 1
    assert notices[0].startswith("a card: ")


def test_the_flash_operators_have_the_signature_that_is_called() -> None:
    """The operators are private, so a release of PyTorch can change them."""
    config = configuration("mla")
    with PretendedGpu() as gpu:
        drafter, frozen = drafter_on_gpu(config, BF16)
        step(drafter, frozen, host_batch(config, BF16))
        called = set(gpu.operations)
    assert {aten._flash_attention_forward.default, aten._flash_attention_backward.default} <= called
    forward, backward = (
        [argument.name for argument in op.default._schema.arguments]
        for op in (aten._flash_attention_forward, aten._flash_attention_backward)
    )
    assert forward[:10] == [
        "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
        "return_debug_mask",
    ]  # fmt: skip
    assert backward[:14] == [
        "grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k",
        "dropout_p", "is_causal", "rng_state", "unused",
    ]  # fmt: skip
    for name in ("scale", "window_size_left", "window_size_right"):
        assert name in forward
        assert name in backward


def test_replay_waits_for_the_row_alone() -> None:
    config = configuration("gqa")
    with PretendedGpu() as gpu:
        drafter, frozen = drafter_on_gpu(config, BF16)
        on_gpu = host_batch(config, BF16).to(CUDA, BF16)
        with gpu.no_waiting(allowed=3):  # the mask, the documents, the result
            hits, supervised = greedy_hits(drafter, frozen, on_gpu, NUM_STEPS)
    assert hits.shape == supervised.shape == (len(on_gpu.input_ids), NUM_STEPS)
    assert hits.device.type == supervised.device.type == "cpu"


@pytest.mark.parametrize(("attention", "num_layers", "window"), [("gqa", 1, 6), ("mla", 2, None)])
def test_drift_waits_once_and_leaves_the_steps_alone(
    attention: str, num_layers: int, window: int | None
) -> None:
    config = configuration(attention, num_layers=num_layers, window=window)
    with PretendedGpu() as gpu:
        drafter, frozen = drafter_on_gpu(config, BF16)
        batch = host_batch(config, BF16)
        chosen = choose_rows(batch, 5)
        assert chosen is not None
        on_gpu = batch.to(CUDA, BF16)
        with gpu.no_waiting(allowed=1):
            measure_drift(drafter, frozen, chosen, on_gpu)
        with gpu.no_waiting():
            step(drafter, frozen, batch)
