"""The README.md of an export: what the drafter is, its results, and how to serve it."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from data.target.checkpoint import is_hub_id
from data.target.served import serving_engines, unserved
from eagle31.export.layouts import Layout, layout_of, served_method
from eagle31.json_files import read_json, write_text
from train.config.data import SELF
from train.config.target import EMBEDDED
from train.evaluation.agreement import describe_counts
from train.report.results import (
    Report,
    acceptance_table,
    describe_conditions,
    describe_mtp_head,
    describe_serving,
    position_table,
    served_length,
    speed_table,
    training_facts,
    warnings_of,
)
from train.templates import template

CARD = "README.md"
_IN_ONE_PASS = {"dspark": "DSpark", "dflash": "DFlash"}  # by vLLM's name of the method
# vLLM's package for CPUs has no working `vllm` command.
_ON_CPU = "-m vllm.entrypoints.openai.api_server --gpu-memory-utilization 0.4 --enforce-eager --model"


def write_model_card(export_dir: Path, report: Report) -> None:
    """Write the card into the export atomically."""
    config = read_json(export_dir / "config.json")
    write_text(export_dir / CARD, model_card(report, config))


def model_card(report: Report, config: dict[str, Any], drafter: str = "PATH_OF_THIS_DIRECTORY") -> str:
    """Return the card as Markdown with the Hub's YAML front matter.

    Args:
        config: the export's config.json.
        drafter: the name under which it is served.
    """
    run_info, evaluation, serving = report.run, report.evaluation, report.serving
    (k, choice), layout = served_length(evaluation, serving), layout_of(config)
    architecture, method = run_info["architecture"], served_method(config)
    data = " and ".join(dict.fromkeys(map(_data_name, run_info["train_data"])))
    target = run_info["target"] if is_hub_id(run_info["target"]) else "TARGET"
    return template(Path(__file__).parent / "templates" / "card.md").render(
        front_matter=_front_matter(run_info, method),
        variant=_variant(config),
        target=target_name(run_info),
        warnings=warnings_of(evaluation, run_info),
        evaluation=evaluation,
        **(_results(evaluation) if evaluation else {}),
        served=_table(*speed_table(serving)) if serving else "",
        served_how=describe_serving(serving) if serving else "",
        serve=serve_command(run_info | {"target": target, "export": drafter}, k, layout.value, method),
        choice=choice,
        architecture=architecture,
        layout=layout.value,
        on_cpu=_ON_CPU,
        in_one_pass=_IN_ONE_PASS.get(method),
        # They need of the target what EAGLE 3 needs, and their exports have vLLM's layout alone.
        engines=serving_engines(architecture)[: 1 if method in _IN_ONE_PASS else None],
        unserved=unserved(architecture, layout),
        target_is_local=target != run_info["target"],
        data=data,
        training=_table(("", ""), ("data", data), *training_facts(run_info)),
        versions=_table(("package", "version"), *sorted(run_info["versions"].items())),
    )


def _results(evaluation: dict[str, Any]) -> dict[str, str]:
    return {
        "results": _table(*acceptance_table(evaluation)),
        "positions": _table(*position_table(evaluation)),
        "conditions": describe_conditions(evaluation),
        "mtp_head": describe_mtp_head(evaluation),
        "completions": describe_counts(evaluation["decoding"]["completions"]),
    }


def serve_command(
    run_info: dict[str, Any], draft_tokens: int, layout: str, method: str, on_cpu: bool = False
) -> str:
    """Return the serve command. An export in speculators' layout names its target itself, without a revision.

    vLLM 0.33 takes the target's name from there only where it is a repository of the Hub.

    Args:
        run_info: `target`, which may have a `target_revision` and `trust_remote_code`, and `export`.
        on_cpu: for the environment that scripts/setup/vllm makes on a machine without a GPU.
    """
    target, drafter, revision = run_info["target"], str(run_info["export"]), run_info.get("target_revision")
    options = f" --revision {shlex.quote(revision)}" if revision else ""
    options += " --trust-remote-code" if run_info.get("trust_remote_code") else ""
    vllm = f'"$(scripts/setup/vllm --print)" {_ON_CPU}' if on_cpu else "vllm serve"
    if layout == Layout.speculators.value and is_hub_id(target) and not revision:
        return f"{vllm} {shlex.quote(drafter)}{options}"
    if layout == Layout.sglang.value:
        return (
            f"python -m sglang.launch_server --model-path {shlex.quote(target)}{options} "
            f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {shlex.quote(drafter)} "
            f"--speculative-num-steps {draft_tokens} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {draft_tokens + 1}"
        )
    speculative = {"model": drafter, "method": method, "num_speculative_tokens": draft_tokens}
    config = shlex.quote(json.dumps(speculative))
    return f"{vllm} {shlex.quote(target)}{options} --speculative-config {config}"


def _variant(config: dict[str, Any]) -> str:
    if (method := served_method(config)) in _IN_ONE_PASS:
        return _IN_ONE_PASS[method]
    return "EAGLE 3.1" if config["fc_norm"] and config["norm_output"] else "EAGLE 3"


def _front_matter(run_info: dict[str, Any], method: str) -> str:
    # The Hub accepts models and datasets by id only and would refuse a card with a path.
    fields: dict[str, Any] = {}
    if is_hub_id(run_info["target"]):
        fields["base_model"] = run_info["target"]
    fields |= {"library_name": "vllm", "pipeline_tag": "text-generation"}
    if run_info.get("license"):
        fields["license"] = run_info["license"]
    if datasets := [one for one in run_info["train_data"] if is_hub_id(one)]:
        fields["datasets"] = datasets
    fields["tags"] = [method, "speculative-decoding", "vllm"]
    return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)


def public_name(name: str) -> str:
    """Return a hub id unchanged, and the last part of a path, so that the card shows no local directories."""
    return name if is_hub_id(name) else Path(name).name


def _data_name(source: str) -> str:
    """Return a source of training data as the card names it: files may have telling names."""
    if source == SELF:
        return "prompts that the target wrote"
    return f"`{source}`" if source == EMBEDDED or is_hub_id(source) else "local files"


def target_name(run_info: dict[str, Any]) -> str:
    """Return the target's name for a title; the embedded target's directory name would say little."""
    return "eagle31's embedded target" if run_info.get("target_embedded") else public_name(run_info["target"])


def _table(head: Sequence[str], *rows: Sequence[str]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
