"""What a recipe's training step takes on a GPU: predicted by the pretended GPU, and measured on a real one.

The predicted time of an operation is the longest of what its FLOPs, its bytes and its launch take at the
rates of `scripts.bench.gpu_rates`. Operations follow one another: nothing runs next to something else.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from data.target.head import TargetHead
from eagle31.cost.flops import count_step, step_flops
from eagle31.errors import UserError
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.model.kinds import new_drafter
from eagle31.training.batch import PackedBatch
from eagle31.training.step import rollout_loss, schedule_batch
from scripts.bench.gpu_rates import GpuRates, gpu_rates
from scripts.bench.pretended_gpu.backward import backward, grad
from scripts.bench.pretended_gpu.device import CUDA, PretendedGpu
from scripts.bench.recorder import OPTIMIZER, PARTS, Operation, Recorder
from train.config.compose import composed
from train.plan.sizes import RunSizes, trainer_settings
from train.tables import aligned
from train.trainer.engine import BETAS, EPS, split_weights
from train.trainer.optimizer import Muon
from train.trainer.train import clip_gradient


@dataclass(frozen=True)
class Prediction:
    """The operations of a row's forward and backward pass and of an update; the row's FLOPs by formula."""

    operations: list[Operation]
    formula_flops: int


class RowStep:
    """Forward and backward of one row of a recipe's drafter, with random weights and states.

    The row is the plan's: documents of `plan.document_tokens`, each with one answer at its end. The step is
    one without metrics, as most are.
    """

    def __init__(self, sizes: RunSizes, device: torch.device) -> None:
        config, train = sizes.drafter, sizes.config.train
        settings = trainer_settings(sizes.config, num_ranks=1)
        dtype = torch.bfloat16 if settings.bf16 else torch.float32
        self.drafter, self.frozen = random_parts(config, settings.train_lm_head, dtype, device)
        self.train = train
        in_chunks = train.rollout_chunk is not None
        row = typical_row(sizes, dtype, torch.device("cpu") if in_chunks else device)
        self.formula_flops = step_flops(
            config,
            count_step(row, train.ttt_steps, config, train.max_drafts_per_row),
            settings.train_lm_head,
        ).total
        self.schedule = schedule_batch(
            row, train.ttt_steps, device, config.key_reach, train.rollout_chunk, train.max_drafts_per_row
        )
        self.batch = row.to(device, states=not in_chunks)

    def run(self, backward: Callable[[Tensor], None]) -> None:
        self.drafter.zero_grad(set_to_none=True)
        loss, _ = rollout_loss(
            self.drafter,
            self.frozen,
            self.batch,
            num_steps=self.train.ttt_steps,
            step_decay=self.train.step_decay,
            with_metrics=False,
            schedule=self.schedule,
        )
        backward(loss)


def random_parts(
    config: DrafterConfig, train_lm_head: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Drafter, FrozenParts]:
    """Return a drafter with random weights and random frozen parts."""
    width, target = config.hidden_size, config.target_hidden_size
    with torch.device(device), _default_dtype(dtype):
        drafter = new_drafter(config, with_head=train_lm_head)
        head = TargetHead(nn.RMSNorm(target), nn.Linear(target, config.vocab_size, bias=False))
        ids = torch.arange(config.draft_vocab_size) if config.pruned else None
        embedding = torch.randn(config.vocab_size, width)
        lm_head = None
        if not train_lm_head:
            lm_head = nn.Linear(width, config.draft_vocab_size, bias=False).requires_grad_(False)
    return drafter, FrozenParts(embedding, head, ids, lm_head)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def typical_row(sizes: RunSizes, dtype: torch.dtype, states_on: torch.device) -> PackedBatch:
    """Return a row with random tokens and states; the other tensors are on the CPU."""
    config, num_tokens = sizes.drafter, sizes.config.train.row_tokens
    length = _document_tokens(sizes)
    token = torch.arange(num_tokens)
    # The last document may be cut; its answer is at its end too.
    lengths = (num_tokens - token // length * length).clamp(max=length)
    num_aux, width = len(config.aux_layer_ids), config.target_hidden_size
    # On the CPU zeros, whose pages take no time and no memory until they are read.
    states = torch.zeros if states_on.type == "cpu" else torch.randn
    return PackedBatch(
        input_ids=torch.randint(config.vocab_size, (num_tokens,)),
        loss_mask=token % length >= lengths * (1 - sizes.config.plan.assistant_fraction),
        document_ids=token // length,
        position_ids=token % length,
        aux_hidden_states=states(num_tokens, num_aux, width, dtype=dtype, device=states_on),
        final_hidden_states=states(num_tokens, width, dtype=dtype, device=states_on),
    )


def _document_tokens(sizes: RunSizes) -> int:
    config = sizes.config
    return min(config.plan.document_tokens or config.data.max_tokens, config.train.row_tokens)


def update(sizes: RunSizes, device: torch.device) -> Callable[[], None]:
    """Return a function that updates float32 weights from float32 gradients, as one rank alone does."""
    config = sizes.config
    with torch.device(device):
        drafter = new_drafter(sizes.drafter, with_head=config.drafter.train_lm_head)
    for weight in drafter.parameters():
        weight.grad = torch.zeros_like(weight)
    matrices, others = split_weights(drafter)
    optimizer: torch.optim.Optimizer
    if trainer_settings(config, num_ranks=1).muon:
        optimizer = Muon(matrices, others, 0.02, lr=1e-4, betas=BETAS, eps=EPS, device=device)
    else:
        optimizer = torch.optim.AdamW([*matrices, *others], lr=1e-4, betas=BETAS, eps=EPS, fused=True)
    optimizer.found_inf = torch.zeros((), device=device)  # type: ignore[attr-defined]

    def take() -> None:
        gradients = [weight.grad for weight in drafter.parameters() if weight.grad is not None]
        clip_gradient(gradients, 1.0, None)
        optimizer.step()

    return take


def predict(sizes: RunSizes) -> Prediction:
    """Record a step and an update on the pretended GPU, whose tensors have no values."""
    with PretendedGpu(), Recorder() as recorder, patch("torch.autograd.grad", grad):
        step = RowStep(sizes, CUDA)
        for _ in range(2):  # the first one makes tables
            recorder.operations.clear()
            step.run(backward)
        operations = [*recorder.operations]
        recorder.part, take = OPTIMIZER, update(sizes, CUDA)
        for _ in range(2):  # the first one makes the optimizer's states
            recorder.operations.clear()
            take()
    return Prediction(operations + recorder.operations, step.formula_flops)


def measure(sizes: RunSizes, device: torch.device, rounds: int = 5) -> tuple[dict[str, float], float]:
    """Run the step and the update on a device.

    Returns:
        The seconds of the kernels by part, and the median time of forward and backward without a profiler.
        On a CPU the seconds by part are those of the operations.
    """
    by_part, seconds = _measured_step(RowStep(sizes, device), device, rounds)
    take = update(sizes, device)
    take()  # makes the optimizer's states
    return by_part | _profiled(take, device, OPTIMIZER), seconds


def _measured_step(step: RowStep, device: torch.device, rounds: int) -> tuple[dict[str, float], float]:
    times = [_timed(lambda: step.run(lambda loss: loss.backward()), device) for _ in range(1 + rounds)]
    return _profiled(lambda: step.run(backward), device), median(times[1:])


def _profiled(action: Callable[[], None], device: torch.device, part: str | None = None) -> dict[str, float]:
    """Return the seconds of the kernels by part."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    recorder = Recorder(profiled=True)
    recorder.part = part
    with profile(activities=activities) as profiler, recorder, patch("torch.autograd.grad", grad):
        action()
        _wait(device)
    found: dict[str, float] = defaultdict(float)
    for event in profiler.events() or []:
        if event.name in PARTS and event.device_type == DeviceType.CPU:
            found[event.name] += (event.device_time_total if on_gpu else event.cpu_time_total) / 1e6
    return found


def _timed(action: Callable[[], None], device: torch.device) -> float:
    _wait(device)
    started = perf_counter()
    action()
    _wait(device)
    return perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def predicted_seconds(operation: Operation, rates: GpuRates) -> float:
    """Return the time of an operation at a GPU's rates."""
    is_attention = "flash_attention" in operation.name
    return max(
        operation.flops / (rates.attention if is_attention else rates.matmul),
        operation.num_bytes / rates.bandwidth,
        operation.host_bytes / rates.host_bandwidth,
        rates.launch_seconds,
    )


def lines(found: Prediction, rates: GpuRates, measured: tuple[dict[str, float], float] | None) -> list[str]:
    """Return the table of a step by part, and a line about the step without the update.

    Args:
        measured: what `measure` returned.
    """
    by_part: dict[str, list[Operation]] = defaultdict(list)
    for operation in found.operations:
        by_part[operation.part].append(operation)
    step = [one for one in found.operations if one.part != OPTIMIZER]
    groups = [(part, by_part[part]) for part in PARTS if part in by_part and part != OPTIMIZER]
    groups += [("forward and backward", step), (OPTIMIZER, by_part[OPTIMIZER])]
    table = [["part", "TFLOP", "GB", "launches", "ms", "MFU", *(["measured ms"] if measured else [])]]
    for name, operations in groups:
        seconds = sum(predicted_seconds(one, rates) for one in operations)
        flops = sum(one.flops for one in operations)
        table.append(
            [
                *(name, f"{flops / 1e12:.3f}", f"{sum(one.num_bytes for one in operations) / 1e9:.2f}"),
                *(f"{len(operations):,}", f"{1000 * seconds:.2f}", f"{flops / seconds / rates.peak:.1%}"),
            ]
        )
        if measured:
            by_name = measured[0]
            total = sum(time for part, time in by_name.items() if part != OPTIMIZER)
            table[-1].append(f"{1000 * by_name.get(name, total):.2f}")
    seconds = sum(predicted_seconds(one, rates) for one in step)
    flops = found.formula_flops
    line = f"by formula {flops / 1e12:.3f} TFLOP: MFU {flops / seconds / rates.peak:.1%} predicted"
    if measured:
        line += f", {flops / measured[1] / rates.peak:.1%} measured, in {1000 * measured[1]:.2f} ms"
    return [*aligned(table), line]


def roofline(overrides: Sequence[str], gpu: str | None) -> list[str]:
    """Return the lines of a recipe: predicted for a GPU, and next to it measured where there is one.

    Args:
        overrides: `recipe=NAME` and other settings.
        gpu: None: this machine's, or an H200.

    Raises:
        UserError: the recipe cannot be used, or the GPU's rates are not known.
    """
    sizes = RunSizes(composed(overrides))
    has_gpu = torch.cuda.is_available()
    name = gpu or (torch.cuda.get_device_name() if has_gpu else "H200")
    rates = gpu_rates(name)
    if rates is None:
        raise UserError("--gpu", name, "Its rates are not known; name another to compare with.")
    train, plan = sizes.config.train, sizes.config.plan
    title = (
        f"{' '.join(overrides)}: {sizes.num_parameters / 1e9:.3f} B parameters, {train.ttt_steps} steps, "
        f"a row of {train.row_tokens:,} tokens in documents of {_document_tokens(sizes):,} tokens, of which "
        f"{plan.assistant_fraction:.0%} are supervised, {name}"
    )
    found = predict(sizes)
    measured = measure(sizes, torch.device("cuda", 0)) if has_gpu else None
    return [title, *lines(found, rates, measured)]
