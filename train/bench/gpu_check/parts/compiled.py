"""What `train.compile` gains: the step at hidden size 4096 with and without it, in turns."""

import statistics
from dataclasses import replace

import torch

from eagle31.kernels.compiled import use_compiled
from train.bench.gpu_check.parts.training_step import (
    DRY_ROW_TOKENS,
    ROUNDS,
    ROW_TOKENS,
    SMALL,
    timed,
)
from train.bench.gpu_check.record import Options, Record
from train.bench.step.engine import build_engine, random_row, update
from train.config.compose import composed
from train.planning.sizes import RunSizes, trainer_settings
from train.trainer.model_engine import ensure_process_group

DRY_STEPS = 2  # each speculation step has its own graphs, which a CPU compiles slowly


def run(options: Options, record: Record) -> None:
    tokens = DRY_ROW_TOKENS if options.dry_run else ROW_TOKENS
    overrides = [f"train.row_tokens={tokens}", f"data.max_tokens={tokens}"]
    if options.dry_run:
        overrides += [f"target.architecture.{name}={value}" for name, value in SMALL.items()]
        overrides += ["drafter.draft_vocab_size=2048", f"train.ttt_steps={DRY_STEPS}"]
    config = composed(["recipe=llama3_1_8b", *overrides])
    device = torch.device(options.device_type)
    settings = replace(trainer_settings(config, num_ranks=1), rows_per_step=1, bf16=True, zero_stage=1)
    ensure_process_group()
    shape = RunSizes(config).drafter
    engine = build_engine(shape, settings, config.train.ttt_steps, device)
    batch = random_row(shape, tokens, 0, torch.bfloat16, device)

    def step(backend: str | None) -> float:
        use_compiled(backend)
        return timed(lambda: update(engine, batch, with_metrics=False), device)

    record.figure("time to compile", round(step("inductor"), 1), "s")
    step(None)
    rounds = [(step(None), step("inductor")) for _ in range(2 if options.dry_run else ROUNDS)]
    plain, compiled = (statistics.median(seconds) for seconds in zip(*rounds, strict=True))
    ratios = [one / other for one, other in rounds]
    record.figure("without train.compile", round(1000 * plain, 1), "ms")
    record.figure("with train.compile", round(1000 * compiled, 1), "ms")
    record.figure("times as fast", round(statistics.median(ratios), 3))
    record.figure("least and greatest", f"{min(ratios):.3f} to {max(ratios):.3f}")
