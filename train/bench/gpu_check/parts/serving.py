"""The export in vLLM, draft by draft, against eagle31's evaluator: `scripts/check_serving`."""

import subprocess
import sys
from pathlib import Path

from eagle31.json_files import read_json
from train.bench.gpu_check import runs
from train.bench.gpu_check.parts.capture import require_vllm
from train.bench.gpu_check.record import Options, Record
from train.bench.gpu_check.runner import ROOT


def run(options: Options, record: Record) -> None:
    require_vllm()
    export, target = runs.finished_export(options), str(runs.quickstart_target().model)
    numbers = options.directory / "serving.json"
    numbers.unlink(missing_ok=True)
    few = ["--num-prompts", "4", "--max-new-tokens", "16"] if options.dry_run else []
    dtype = "bfloat16" if options.num_gpus else "float32"
    line = [sys.executable, str(ROOT / "scripts" / "check_serving"), str(export), "--target", target]
    line += ["--dtype", dtype, "--json", str(numbers), *few]
    print("$", *line, flush=True)
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout, done.stderr, flush=True)
    if not numbers.exists():
        raise runs.RunFailed((done.stderr.strip() or f"It ended with status {done.returncode}.")[-500:])
    found = read_json(numbers)
    report(record, found)
    failures = "; ".join(found.get("failures", [])) or "drafts, accepted counts and completions agree"
    record.check("vLLM drafts as eagle31's evaluator does", done.returncode == 0, failures)


def report(record: Record, found: dict) -> None:
    record.figure("engine", found["engine"])
    for side in ("eagle31", "vllm"):
        record.figure(f"acceptance length, {side}", round(found[side]["acceptance_length"], 3))
    record.figure("log of vLLM", str(Path("serving.json").with_suffix(".log")))
