"""The README.md of an export: what the drafter is, what was measured, how to serve it."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from data.target.checkpoint import is_hub_id
from eagle31.export.layouts import Layout, layout_of
from eagle31.json_files import write_text
from train.reporting.results import decoding_runs, identical_completions, in_vllm

DRAFT_TOKENS = 3  # what to serve with where nothing was measured


def write_model_card(
    export_dir: Path, facts: dict[str, Any], evaluation: dict[str, Any], config: dict[str, Any]
) -> Path:
    """Writes the card into the export, atomically."""
    path = Path(export_dir) / "README.md"
    write_text(path, model_card(facts, evaluation, config))
    return path


def model_card(
    facts: dict[str, Any],
    evaluation: dict[str, Any],
    config: dict[str, Any],
    serving: dict[str, Any] | None = None,
    plots: Sequence[str] = (),
) -> str:
    """The card as Markdown with the Hub's YAML front matter.

    Args:
        facts: what the run knows of itself; `target_embedded`, `license` and `hub_id` may be missing.
        evaluation: what the evaluation measured; empty when nothing was.
        config: the export's config.json.
        serving: what was measured in vLLM.
        plots: files beside the card.
    """
    target = target_name(facts)
    sections = [
        f"# {_variant(config)} drafter for {target}",
        f"A draft model for speculative decoding: it proposes tokens that `{target}` verifies, "
        "so the text stays the target's own and takes fewer of its forward passes. "
        "It reads the target's hidden states and serves with no other model.",
        "## Measured\n\n" + "\n\n".join([_measured(evaluation), *_served(serving), *map(_picture, plots)]),
        "## Serve\n\n```shell\n"
        + serve_command(*_public_paths(facts), evaluation.get("k", DRAFT_TOKENS), layout_of(config).value)
        + "\n```",
        "## Training\n\n" + _table(("", ""), _training_rows(facts)),
        "## Limits\n\n" + _limits(facts, evaluation),
        "## Versions\n\n" + _table(("package", "version"), sorted(facts["versions"].items())),
    ]
    return f"---\n{_front_matter(facts)}---\n\n" + "\n\n".join(sections) + "\n"


def serve_command(target: str, drafter: str, draft_tokens: int, layout: str = Layout.vllm.value) -> str:
    """The shell command that serves the target with the drafter; speculators' layout names its target."""
    if layout == Layout.speculators.value:
        return f"vllm serve {shlex.quote(drafter)}"
    speculative = {"model": drafter, "method": "eagle3", "num_speculative_tokens": draft_tokens}
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(speculative))}"


def _front_matter(facts: dict[str, Any]) -> str:
    # The Hub takes models and datasets by id only: a path would make it refuse the card.
    fields: dict[str, Any] = {}
    if is_hub_id(facts["target"]):
        fields["base_model"] = facts["target"]
    fields["library_name"] = "vllm"
    fields["pipeline_tag"] = "text-generation"
    if facts.get("license"):
        fields["license"] = facts["license"]
    if is_hub_id(facts["train_data"]):
        fields["datasets"] = [facts["train_data"]]
    fields["tags"] = ["eagle3", "speculative-decoding", "vllm"]
    return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)


def _measured(evaluation: dict[str, Any]) -> str:
    if not evaluation.get("greedy"):
        return "Not measured."
    rows = []
    for name, temperature, stats in decoding_runs(evaluation):
        speedup = stats.get("speedup")
        rows.append(
            (
                name,
                str(stats["k"]),
                f"{temperature:g}",
                f"{stats['acceptance_length']:.2f}",
                f"{stats['tokens_per_target_forward']:.2f}",
                ", ".join(f"{100 * share:.0f} %" for share in stats["absolute_acceptance"]),
                "" if speedup is None else f"{speedup:.2f}x",
            )
        )
    head = (
        "drafter",
        "k",
        "temperature",
        "acceptance length",
        "tokens per target forward",
        "accepted at positions 1 to k",
        "speed-up",
    )
    text = _table(head, rows)
    text += (
        f"\n\n{evaluation['num_prompts']} held-out prompts, up to {evaluation['max_new_tokens']} new tokens "
        f"each; engine: {evaluation['engine']}. Acceptance length is the number of tokens emitted per draft "
        "and verification, accepted tokens + 1; the speed-up is against plain decoding in the same engine."
    )
    return text + f"\n\nGreedy text against the target alone: {identical_completions(evaluation['greedy'])}."


def _served(serving: dict[str, Any] | None) -> list[str]:
    if serving is None:
        return []
    head = ("users at once", "tokens per second per user", "with the drafter", "speed-up")
    rows = [
        (
            str(row["concurrency"]),
            f"{row['plain']['median']:.1f}",
            f"{row['drafter']['median']:.1f}",
            f"{row['speedup']['median']:.2f}x",
        )
        for row in serving["rows"]
    ]
    told = (
        f"In {serving['engine']} ({serving['dtype']}, {serving['device']}), k = {serving['k']}, temperature "
        f"{serving['temperature']:g}: acceptance length {serving['acceptance_length']:.2f}."
    )
    return [told, _table(head, rows)]


def _picture(path: str) -> str:
    return f"![{Path(path).stem.replace('_', ' ')}]({path})"


def samples_text(facts: dict[str, Any]) -> str:
    num_tokens = facts["num_tokens"]
    return f"{facts['num_samples']:,} samples" + (
        f", {num_tokens:,} tokens" if num_tokens is not None else ""
    )


def steps_text(facts: dict[str, Any]) -> str:
    best_step = facts["best_step"]
    return f"{facts['steps']:,}" + (f", exported step {best_step:,}" if best_step is not None else "")


def vocabulary_text(facts: dict[str, Any]) -> str:
    if facts["draft_vocab_size"] is None:
        return "all of the target's"
    return f"{facts['draft_vocab_size']:,} tokens, {100 * facts['vocab_coverage']:.2f} % of those trained on"


def _training_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("data", f"`{public_name(facts['train_data'])}`"),
        ("trained on", samples_text(facts)),
        ("optimizer steps", steps_text(facts)),
        ("speculation steps per row", str(facts["ttt_steps"])),
        ("aux layer ids (decoder layers applied)", ", ".join(map(str, facts["aux_layer_ids"]))),
        ("draft vocabulary", vocabulary_text(facts)),
        ("parameters of the drafter", f"{facts['drafter_parameters']:,}"),
        ("recipe", f"`{facts['recipe']}`, eagle31 at revision {facts['git_revision'] or 'unknown'}"),
    ]


def _limits(facts: dict[str, Any], evaluation: dict[str, Any]) -> str:
    data = public_name(facts["train_data"])
    lines = [
        f"- Acceptance depends on the text. Expect other numbers on text unlike `{data}`, with another chat "
        "template, or with other sampling parameters.",
        "- The drafter fits this target, its revision and its tokenizer; a fine-tuned target accepts less.",
    ]
    if evaluation.get("greedy") and not in_vllm(evaluation):
        lines.append(
            f"- The numbers are from the reference engine ({evaluation['engine']}), not from vLLM. "
            "Acceptance should carry over to greedy decoding there; the speed-up depends on the hardware."
        )
    elif evaluation.get("greedy"):
        lines.append("- The speed-up depends on the hardware and on how many prompts are decoded at a time.")
    return "\n".join(lines)


def _variant(config: dict[str, Any]) -> str:
    return "EAGLE 3.1" if config["fc_norm"] and config["norm_output"] else "EAGLE 3"


def _public_paths(facts: dict[str, Any]) -> tuple[str, str]:
    return public_name(facts["target"]), facts.get("hub_id") or "PATH_OF_THIS_DIRECTORY"


def public_name(name: str) -> str:
    """A hub id as it is, and of a path the last part: where it lies is nobody else's business."""
    return name if is_hub_id(name) else Path(name).name


def target_name(facts: dict[str, Any]) -> str:
    """As a title has it: the directory of the embedded target tells nobody what it is."""
    return "eagle31's embedded target" if facts.get("target_embedded") else public_name(facts["target"])


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )
