"""The quickstart's export: checked without vLLM, and evaluated as any published drafter is."""

from data.target.spec import TargetSpec
from train.bench.gpu_check import runs
from train.bench.gpu_check.record import Options, Record
from train.drafter.export_checks import validate_export
from train.evaluation.checkpoint import CheckpointEvaluation, evaluate_checkpoint
from train.reporting.results import acceptances


def run(options: Options, record: Record) -> None:
    export, embedded = runs.finished_export(options), runs.quickstart_target()
    target = str(embedded.model)
    findings = validate_export(export, TargetSpec(target))
    found = "; ".join(f"{one.field}: {one.found}, expected {one.expected}" for one in findings)
    record.check("the export is valid", not findings, found or "nothing found")
    few = options.dry_run
    settings = CheckpointEvaluation(
        checkpoint=str(export),
        target=target,
        data=str(embedded.held_out),
        num_prompts=2 if few else 16,
        max_new_tokens=16 if few else 96,
        dtype="bfloat16" if options.num_gpus else "auto",
        temperature=0.0 if few else 1.0,
    )
    result = evaluate_checkpoint(settings)
    record.figure("engine", result["engine"])
    for one in acceptances(result):
        length = one.at(result["k"])["acceptance_length"]
        name = f"acceptance length, {one.drafts} drafts at temperature {one.temperature:g}"
        record.figure(name, round(length, 3), f"at k = {result['k']}")
    decoding = result["decoding"]
    different = decoding["completions"]["num_different"]
    record.check(
        "greedy completions are the target's",
        different == 0,
        f"{different} of {decoding['num_prompts']} differ",
    )
