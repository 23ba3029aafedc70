"""The README.md of an export: what the drafter is, its results, and how to serve it."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from data.target.checkpoint import is_hub_id
from eagle31.export.layouts import Layout, layout_of
from eagle31.json_files import write_text
from train.reporting.results import (
    acceptances,
    describe_conditions,
    describe_counts,
    describe_speed,
    in_vllm,
    with_interval,
)

DRAFT_TOKENS = 3  # tokens per draft in the serve command when nothing was evaluated


def write_model_card(
    export_dir: Path, run_info: dict[str, Any], evaluation: dict[str, Any], config: dict[str, Any]
) -> Path:
    """Write the card into the export atomically."""
    path = Path(export_dir) / "README.md"
    write_text(path, model_card(run_info, evaluation, config))
    return path


def model_card(
    run_info: dict[str, Any],
    evaluation: dict[str, Any],
    config: dict[str, Any],
    serving: dict[str, Any] | None = None,
    plots: Sequence[str] = (),
) -> str:
    """Return the card as Markdown with the Hub's YAML front matter.

    Args:
        run_info: describes the run; `target_embedded`, `license` and `hub_id` may be missing.
        evaluation: the evaluation's results; empty if there are none.
        config: the export's config.json.
        serving: speed in vLLM, from serving.json.
        plots: image files next to the card.
    """
    target = target_name(run_info)
    sections = [
        f"# {_variant(config)} drafter for {target}",
        f"A draft model for speculative decoding. It proposes tokens that `{target}` verifies, so the output "
        "is what the target would write and needs fewer of its forward passes. It reads the target's hidden "
        "states and works with no other model.",
        *([f"> **Warning.** {warning}"] if (warning := untrained_warning(run_info)) else []),
        "## Results\n\n" + "\n\n".join([_measured(evaluation), *_served(serving), *map(_picture, plots)]),
        "## Serve\n\n```shell\n"
        + serve_command(*_public_paths(run_info), evaluation.get("k", DRAFT_TOKENS), layout_of(config).value)
        + "\n```",
        "## Training\n\n" + _table(("", ""), _training_rows(run_info)),
        "## Limits\n\n" + _limits(run_info, evaluation),
        "## Versions\n\n" + _table(("package", "version"), sorted(run_info["versions"].items())),
    ]
    return f"---\n{_front_matter(run_info)}---\n\n" + "\n\n".join(sections) + "\n"


def serve_command(
    target: str,
    drafter: str,
    draft_tokens: int,
    layout: str = Layout.vllm.value,
    batch_sizes: Sequence[Sequence[int]] = (),
) -> str:
    """Return the serve command. An export in speculators' layout names its target itself.

    vLLM 0.33 takes the target's name from there only where it is a repository of the Hub.

    Args:
        draft_tokens: tokens per draft; 0 stands for a server without the drafter.
        batch_sizes: ranges of batch sizes with shorter drafts: first and last size, tokens per draft.
    """
    if not draft_tokens:
        return f"vllm serve {shlex.quote(target)}"
    if layout == Layout.speculators.value and is_hub_id(target):
        return f"vllm serve {shlex.quote(drafter)}"
    speculative: dict[str, Any] = {
        "model": drafter,
        "method": "eagle3",
        "num_speculative_tokens": draft_tokens,
    }
    if batch_sizes:
        speculative["num_speculative_tokens_per_batch_size"] = batch_sizes
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(speculative))}"


def _front_matter(run_info: dict[str, Any]) -> str:
    # The Hub accepts models and datasets by id only and would refuse a card with a path.
    fields: dict[str, Any] = {}
    if is_hub_id(run_info["target"]):
        fields["base_model"] = run_info["target"]
    fields["library_name"] = "vllm"
    fields["pipeline_tag"] = "text-generation"
    if run_info.get("license"):
        fields["license"] = run_info["license"]
    if is_hub_id(run_info["train_data"]):
        fields["datasets"] = [run_info["train_data"]]
    fields["tags"] = ["eagle3", "speculative-decoding", "vllm"]
    return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)


def _measured(evaluation: dict[str, Any]) -> str:
    if not evaluation:
        return "Not evaluated."
    k, measured = evaluation["k"], acceptances(evaluation)
    longest = measured[0].longest["k"]
    head = (
        "drafter",
        "drafts",
        "temperature",
        f"acceptance length at k = {k} (95 % interval)",
        f"at k = {longest}",
        f"accepted at positions 1 to {longest}",
    )
    rows = [
        (
            one.drafter,
            one.drafts,
            f"{one.temperature:g}",
            with_interval(one.at(k)),
            with_interval(one.longest) if one.longest["k"] == longest else "",
            ", ".join(f"{100 * rate:.0f} %" for rate in one.longest["absolute_acceptance"]),
        )
        for one in measured
    ]
    decoding = evaluation["decoding"]
    conditions = (
        f"{describe_conditions(evaluation)}. Acceptance length is the number of tokens emitted per draft and "
        "verification, accepted tokens + 1, and its interval is over prompts. Greedy drafts are those that "
        "vLLM makes at any temperature; sampled drafts are drawn from the drafter's distribution, as in the "
        "classic rule of speculative sampling."
    )
    completions = describe_counts(decoding["completions"])
    speed = f"Speed-up over the same engine without the drafter: {describe_speed(decoding['timing'])}."
    comparison = f"Greedy completions compared with the target without drafter: {completions}."
    sections = [_table(head, rows), conditions, speed, comparison]
    return "\n\n".join(sections)


def _served(serving: dict[str, Any] | None) -> list[str]:
    if serving is None:
        return []
    head = ("concurrent users", "k", "tokens per second per user", "with the drafter", "speed-up")
    rows = [
        (
            str(row["concurrency"]),
            str(row["k"]),
            f"{row['plain']['median']:.1f}",
            f"{row['drafter']['median']:.1f}",
            f"{row['speedup']['median']:.2f}x",
        )
        for row in serving["rows"]
    ]
    conditions = (
        f"In {serving['engine']} ({serving['dtype']}, {serving['device']}), temperature "
        f"{serving['temperature']:g}:"
    )
    return [conditions, _table(head, rows)]


def _picture(path: str) -> str:
    return f"![{Path(path).stem.replace('_', ' ')}]({path})"


def describe_samples(run_info: dict[str, Any]) -> str:
    num_tokens = run_info["num_tokens"]
    return f"{run_info['num_samples']:,} samples" + (
        f", {num_tokens:,} tokens" if num_tokens is not None else ""
    )


def describe_steps(run_info: dict[str, Any]) -> str:
    best_step = run_info["best_step"]
    return f"{run_info['steps']:,}" + (f"; step {best_step:,} is exported" if best_step is not None else "")


def describe_vocabulary(run_info: dict[str, Any]) -> str:
    if run_info["draft_vocab_size"] is None:
        return "the target's full vocabulary"
    coverage = f"{100 * run_info['vocab_coverage']:.2f} % of the training tokens"
    return f"{run_info['draft_vocab_size']:,} tokens, {coverage}"


def untrained_warning(run_info: dict[str, Any]) -> str | None:
    """Return a warning if the export has the weights from before the first step."""
    if run_info["best_step"] != 0:
        return None
    return (
        f"This drafter is untrained: none of the checkpoints up to step {run_info['steps']:,} has as long an "
        "acceptance length on the held-out prompts as the weights before the first step, which are exported. "
        "Train for longer, on more data, or with another optim.lr."
    )


def _training_rows(run_info: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("data", f"`{public_name(run_info['train_data'])}`"),
        ("trained on", describe_samples(run_info)),
        ("optimizer steps", describe_steps(run_info)),
        ("speculation steps per position", str(run_info["ttt_steps"])),
        ("aux layer ids (decoder layers applied)", ", ".join(map(str, run_info["aux_layer_ids"]))),
        ("draft vocabulary", describe_vocabulary(run_info)),
        ("drafter parameters", f"{run_info['drafter_parameters']:,}"),
        ("recipe", f"`{run_info['recipe']}`, eagle31 at revision {run_info['git_revision'] or 'unknown'}"),
    ]


def _limits(run_info: dict[str, Any], evaluation: dict[str, Any]) -> str:
    data = public_name(run_info["train_data"])
    lines = [
        f"- Acceptance depends on the data. Expect other numbers on data unlike `{data}`, with another chat "
        "template, or with other sampling parameters.",
        "- The drafter belongs to this target, revision and tokenizer; a fine-tuned target accepts less.",
    ]
    if evaluation and not in_vllm(evaluation):
        lines.append(
            f"- The numbers are from the reference engine ({evaluation['engine']}), not from vLLM. "
            "Acceptance should carry over to greedy drafts there; the speed-up depends on the hardware."
        )
    elif evaluation:
        lines.append("- The speed-up depends on the hardware and on the number of concurrent prompts.")
    return "\n".join(lines)


def _variant(config: dict[str, Any]) -> str:
    return "EAGLE 3.1" if config["fc_norm"] and config["norm_output"] else "EAGLE 3"


def _public_paths(run_info: dict[str, Any]) -> tuple[str, str]:
    return public_name(run_info["target"]), run_info.get("hub_id") or "PATH_OF_THIS_DIRECTORY"


def public_name(name: str) -> str:
    """Return a hub id unchanged, and the last part of a path, so that the card shows no local directories."""
    return name if is_hub_id(name) else Path(name).name


def target_name(run_info: dict[str, Any]) -> str:
    """Return the target's name for a title; the embedded target's directory name would say little."""
    return "eagle31's embedded target" if run_info.get("target_embedded") else public_name(run_info["target"])


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )
