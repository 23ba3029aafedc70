"""Readers of evaluation.json and serving.json: what the report, the model card and the tables show."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle31.errors import UserError
from eagle31.json_files import expecting, read_json_object
from train.evaluation.agreement import describe_counts
from train.evaluation.intervals import Interval, length_of, paired_ratio
from train.tables import aligned, counted

# Greedy drafts are what vLLM makes by default, at any temperature; sampled drafts are those of the classic
# rule of speculative sampling.
GREEDY, SAMPLED = "greedy", "sampled"
MTP_HEAD = "the target's own MTP head"
_DRAFT_TOKENS = 3  # in the serve command when nothing was evaluated


@dataclass(frozen=True)
class Acceptance:
    """What was measured of one drafter with one kind of drafts at one temperature."""

    drafter: str
    drafts: str
    temperature: float
    measured: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.drafter}, {self.drafts}, temperature {self.temperature:g}"

    def at(self, draft_tokens: int) -> dict[str, Any]:
        return at_draft_length(self.measured, draft_tokens)


@dataclass(frozen=True)
class Report:
    """The numbers of a finished run."""

    evaluation: dict[str, Any]  # evaluation.json; empty for the card of an export that is not evaluated yet
    run: dict[str, Any]  # what describes the run
    metrics: list[dict[str, Any]] = field(default_factory=list)  # the lines of metrics.jsonl
    serving: dict[str, Any] | None = None  # the speed of the same export in vLLM, from serving.json


def read_report(output_dir: Path) -> Report:
    """Return the numbers in a run's report.

    Raises:
        UserError: the run has no report yet, or one of another export.
    """
    path = Path(output_dir) / "report" / "metrics.json"
    if not path.exists():
        raise UserError("RUN", output_dir, "It has no report; run its recipe with stages=[report].")
    served = path.with_name("serving.json")
    serving = read_json_object(served) if served.exists() else {}
    export = (Path(output_dir) / "export").resolve()
    of_this_export = serving.get("export") == str(export)
    with expecting(path, "a report's numbers"):
        known = read_json_object(path)
        _ = known["evaluation"].keys(), known["run"].keys()
        made_from = known["run"].get("export_key")
        if made_from is not None and made_from != export.parent.name:
            remedy = "Its report is of another export; run its recipe with stages=[report]."
            raise UserError("RUN", output_dir, remedy)
        return Report(
            known["evaluation"], known["run"], known["metrics"], serving if of_this_export else None
        )


def at_draft_length(measured: dict[str, Any], draft_tokens: int) -> dict[str, Any]:
    """Return the statistics at one draft length."""
    [found] = (row for row in measured["by_draft_length"] if row["k"] == draft_tokens)
    return found


def acceptances(evaluation: dict[str, Any]) -> list[Acceptance]:
    """Return all that was measured; the trained drafter's greedy drafts at temperature 0 come first."""
    found = [Acceptance("trained", GREEDY, 0.0, evaluation["trained"])]
    mtp = evaluation.get("mtp") or {}
    if mtp.get("by_draft_length"):
        found.append(Acceptance(MTP_HEAD, GREEDY, 0.0, mtp))
    sampling: dict[str, Any] = evaluation.get("sampling") or {}
    for drafts in (GREEDY, SAMPLED):
        measured = sampling.get(f"{drafts}_drafts")
        # All sampled completions may be shorter than a draft.
        if measured and any(row["k"] == evaluation["k"] for row in measured["by_draft_length"]):
            found.append(Acceptance("trained", drafts, sampling["temperature"], measured))
    if evaluation.get("untrained"):
        found.append(Acceptance("untrained", GREEDY, 0.0, evaluation["untrained"]))
    return found


def speed_table(numbers: dict[str, Any]) -> list[list[str]]:
    """Return a header, and a row for each concurrency and draft length."""
    rows = [["users", "k", "without drafter", "with it", "speed-up", "acceptance length"]]
    for row in numbers["rows"]:
        rates = [f"{row[side]:.1f}" for side in ("plain", "drafter")]
        speedup = Interval(**row["speedup"]).shown("x")
        rows.append(
            [str(row["concurrency"]), str(row["k"]), *rates, speedup, f"{row['acceptance_length']:.2f}"]
        )
    return rows


def describe_serving(numbers: dict[str, Any]) -> str:
    """Return what the table has and its conditions, as a sentence."""
    return (
        "Output tokens per second per user, and their quotient with its 95 % interval over prompts. "
        f"{numbers['engine']}, {numbers['dtype']}, {numbers['device']}; temperature 0, at most "
        f"{numbers['max_new_tokens']} tokens per completion."
    )


def fastest(numbers: dict[str, Any]) -> dict[str, Any]:
    """Return the row of the draft length that served the fewest users fastest."""
    rows = [row for row in numbers["rows"] if row["concurrency"] == numbers["rows"][0]["concurrency"]]
    return max(rows, key=lambda row: row["drafter"])


def served_length(evaluation: dict[str, Any], serving: dict[str, Any] | None) -> tuple[int, str]:
    """Return the draft length for the serve command, and why it is that one or how to choose it."""
    if serving:
        row = fastest(serving)
        lengths = ", ".join(map(str, sorted({one["k"] for one in serving["rows"]})))
        return row[
            "k"
        ], f"Of the measured k ({lengths}), {row['k']} served {counted(row['concurrency'], 'user')} fastest."
    k, measure = evaluation.get("k", _DRAFT_TOKENS), "scripts/bench/serving EXPORT --target TARGET -k 2 3 4"
    return k, f"Which k serves fastest depends on the machine and the load; {measure} measures it."


def headline(evaluation: dict[str, Any]) -> str:
    """Return the acceptance length in a sentence."""
    stats = at_draft_length(evaluation["trained"], evaluation["k"])
    return f"Acceptance length {stats['acceptance_length']:.2f} at k = {stats['k']}, temperature 0"


def describe_conditions(evaluation: dict[str, Any]) -> str:
    """Return what was replayed and what was decoded."""
    prompts = counted(evaluation["num_prompts"], "held-out prompt")
    return (
        f"{prompts} by replay, up to {evaluation['max_new_tokens']} new tokens each; "
        f"{evaluation['decoding']['num_prompts']} of them decoded by {evaluation['engine']}"
    )


def describe_mtp_head(evaluation: dict[str, Any]) -> str:
    """Return how the drafter compares with the target's own MTP head; empty if that was not measured."""
    mtp, k = evaluation.get("mtp") or {}, evaluation["k"]
    if not mtp.get("by_draft_length"):
        return ""
    counts = {name: [of_length[k - 1]] for name, of_length in evaluation["trained"]["by_prompt"].items()}
    num_prompts = len(mtp["by_prompt"]["drafts"][0])
    text = f"drafted in vLLM for {num_prompts} of the held-out prompts"
    if num_prompts == len(counts["drafts"][0]):  # the same prompts, in the same order
        ratio = paired_ratio({"by_prompt": counts}, mtp, 0)
        text += f"; the trained drafter has {ratio.shown()} times its acceptance length"
    return text


def untrained_warning(run_info: dict[str, Any]) -> str | None:
    """Return a warning if the export has the weights from before the first step."""
    if run_info["best_step"] != 0:
        return None
    return (
        f"This drafter is untrained: none of the checkpoints up to step {run_info['steps']:,} has as long an "
        "acceptance length on the held-out prompts as the weights before the first step, which are exported. "
        "Train for longer, on more data, or with another optim.lr."
    )


def warnings_of(evaluation: dict[str, Any], run_info: dict[str, Any] | None = None) -> list[str]:
    """Return what makes the results doubtful: no training, or decoding that differs."""
    untrained = untrained_warning(run_info) if run_info else None
    found = [untrained] if untrained else []
    for name, what, cannot in (
        ("completions", "Speculative decoding wrote another text than the target alone", "The numbers"),
        ("replay", "Decoding drafted other tokens than replay after the same text", "Acceptance by replay"),
    ):
        counts = evaluation["decoding"][name] if evaluation else {}
        if counts.get("num_different"):
            where = f"Decoded by {evaluation['engine']}; replayed from {evaluation['states']}."
            remedy = "If the precisions are the same, see what scripts/check_serving says of the export."
            found.append(f"{what}: {describe_counts(counts)}. {cannot} cannot be trusted. {where} {remedy}")
    counts = evaluation["decoding"]["completions"] if evaluation else {}
    if counts.get("num_not_compared", 0) == sum(counts.values()) > 0:
        found.append(
            "Decoding was not checked: no completion has the first token of the target's own, and acceptance "
            f"was replayed from other texts than {evaluation['engine']} writes."
        )
    return found


def acceptance_table(evaluation: dict[str, Any]) -> list[list[str]]:
    """Return a header, and a row for all that was measured at the evaluation's draft length."""
    rows = [["drafter", "drafts", "k", "temperature", "acceptance length", "95 % interval"]]
    for one in acceptances(evaluation):
        length = length_of(one.at(evaluation["k"]))
        name = [one.drafter, one.drafts, str(evaluation["k"]), f"{one.temperature:g}"]
        rows.append([*name, f"{length.value:.2f}", length.bounds])
    return rows


def position_table(evaluation: dict[str, Any]) -> list[list[str]]:
    """Return a header, and for each row how many of the drafts were accepted up to a position."""
    k = evaluation["k"]
    rows = [["accepted up to position", *map(str, range(1, k + 1))]]
    for one in acceptances(evaluation):
        rows.append([str(one), *(f"{100 * rate:.0f} %" for rate in one.at(k)["absolute_acceptance"])])
    return rows


def details(evaluation: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the conditions and what decoding showed, as names and values."""
    decoding, sampling = evaluation["decoding"], evaluation["sampling"]
    mtp = describe_mtp_head(evaluation) or (evaluation.get("mtp") or {}).get("missing")
    return [
        ("measured on", describe_conditions(evaluation)),
        *([("sampled completions", sampling["settings"])] if sampling else []),
        *([(MTP_HEAD, mtp)] if mtp else []),
        ("completions, compared with target", describe_counts(decoding["completions"])),
        ("drafts, compared with replay", describe_counts(decoding["replay"])),
    ]


def training_facts(run_info: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what the drafter is and was trained on, as names and values."""
    coverage = f"{100 * run_info['vocab_coverage']:.2f} % of the training tokens"
    # With these arguments the target has to be served too.
    template = ", ".join(f"{name}={value}" for name, value in run_info["template_kwargs"].items())
    return [
        *([("chat template", template)] if template else []),
        *([("target revision", revision)] if (revision := run_info.get("target_revision")) else []),
        ("trained on", f"{run_info['num_samples']:,} samples, {run_info['num_tokens']:,} tokens"),
        ("optimizer steps", f"{run_info['steps']:,}; step {run_info['best_step']:,} is exported"),
        ("speculation steps per position", str(run_info["ttt_steps"])),
        ("aux layer ids (decoder layers applied)", ", ".join(map(str, run_info["aux_layer_ids"]))),
        ("draft vocabulary", f"{run_info['draft_vocab_size']:,} tokens, {coverage}"),
        ("drafter parameters", f"{run_info['drafter_parameters']:,}"),
        ("recipe", f"{run_info['recipe']}, eagle31 at revision {run_info['git_revision']}"),
    ]


def format_results(
    evaluation: dict[str, Any],
    run_info: dict[str, Any] | None = None,
    serving: dict[str, Any] | None = None,
) -> str:
    """Return the results of a run, or those of scripts/evaluate, as tables for the terminal."""
    lines = [f"WARNING: {warning}\n" for warning in warnings_of(evaluation, run_info)]
    lines += [*aligned(acceptance_table(evaluation), text_columns=2), ""]
    lines += [*aligned(position_table(evaluation)), ""]
    if serving:
        lines += [*aligned(speed_table(serving)), describe_serving(serving), ""]
    paths = [(name, str(run_info[name])) for name in ("export", "report") if run_info]
    return "\n".join(lines + aligned([*details(evaluation), *paths], text_columns=2))
