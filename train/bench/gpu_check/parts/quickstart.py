"""The quickstart in bf16 with ZeRO 1: every stage, from the target's training to the report."""

import statistics

from eagle31.json_files import read_json
from train.bench.gpu_check import runs
from train.bench.gpu_check.record import Options, Record
from train.reporting.results import at_draft_length, describe_counts, describe_speed


def run(options: Options, record: Record) -> None:
    directory = options.directory / runs.QUICKSTART
    record.figure("the whole run", round(runs.finish(runs.command(options, directory)), 1), "s")
    for stage in read_json(directory / "report" / "metrics.json")["run"]["stages"]:
        record.figure(f"stage {stage['name']}", round(stage["seconds"], 1), "s")
    training = runs.training_records(directory)
    first, last = training[0]["loss"], training[-1]["loss"]
    record.figure("loss at the first and the last logged step", f"{first:.3f}, {last:.3f}")
    speed = statistics.median(one["tokens_per_second"] for one in training)
    record.figure("tokens per second in training, median", round(speed))
    record.check("the loss falls", last < first, f"from {first:.3f} to {last:.3f}")
    evaluation = runs.evaluation_of(directory)
    decoding = evaluation["decoding"]
    stats = at_draft_length(evaluation["trained"], evaluation["k"])
    record.figure("acceptance length by replay", round(stats["acceptance_length"], 3), f"at k = {stats['k']}")
    record.figure("speed-up of speculative decoding", describe_speed(decoding["timing"]))
    checks = {
        "completions": "speculative decoding writes the target's text",
        "replay": "replay accepts the drafts that decoding accepts",
    }
    for name, meaning in checks.items():
        counts = decoding[name]
        record.figure(f"decoded prompts, {name}", describe_counts(counts))
        detail = f"prompts that differ at more than a near-tie: {counts['num_different']}"
        record.check(meaning, counts["num_different"] == 0, detail)
