"""The quickstart in bf16 with ZeRO 1: every stage, from the target's training to the report."""

import statistics

from eagle31.json_files import read_json
from train.bench.gpu_check import runs
from train.bench.gpu_check.record import Options, Record


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
    greedy, replay = evaluation["greedy"], evaluation["replay"]
    record.figure("acceptance length", round(greedy["acceptance_length"], 3), f"at k = {greedy['k']}")
    record.figure("acceptance length by replay", round(replay["acceptance_length"], 3))
    record.figure("speed-up of speculative decoding", round(greedy["speedup"], 2), "x")
    counts = {name: greedy[f"num_{name}"] for name in ("identical", "near_tie", "different")}
    record.figure("completions", ", ".join(f"{count} {name}" for name, count in counts.items()))
    detail = "completions that differ from the target's at more than a near-tie: {different}".format(**counts)
    record.check("speculative decoding writes the target's text", counts["different"] == 0, detail)
