"""Which draft length to serve: the report's section and the table for the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from eagle31.errors import UserError
from eagle31.json_files import read_sealed_json, write_sealed_json
from train.draft_length.choice import Candidate, Choice, acceptance_resamples, choose, schedule
from train.draft_length.step_times import StepTimes
from train.reporting.model_card import serve_command
from train.reporting.plots import LIGHT_RAMP, MUTED, Panel, label_ends, ramp
from train.reporting.results import GREEDY, acceptances
from train.tables import aligned

FORMAT = 1  # of step_times.json
PLAIN = "no drafter"


@dataclass(frozen=True)
class Timing:
    """The times of decoding steps at several concurrencies, and where they are from."""

    source: str
    times: list[StepTimes]


@dataclass(frozen=True)
class DraftLengths:
    """The choices at one temperature of the target, one for each concurrency."""

    temperature: float
    choices: list[Choice]


def write_step_times(output_dir: Path, timing: Timing) -> Path:
    """Write `report/step_times.json`, which holds for the run's present export."""
    path = Path(output_dir) / "report" / "step_times.json"
    export = str((Path(output_dir) / "export").resolve())
    times = [one.to_json() for one in timing.times]
    write_sealed_json(path, {"format": FORMAT, "source": timing.source, "export": export, "times": times})
    return path


def read_step_times(output_dir: Path) -> Timing | None:
    """Return the times of the run's export; None if there are none, or those of another export."""
    path = Path(output_dir) / "report" / "step_times.json"
    if not path.exists():
        return None
    found = read_sealed_json(path)
    try:
        if found.get("format") != FORMAT or Path(found["export"]) != (Path(output_dir) / "export").resolve():
            return None
        return Timing(found["source"], [StepTimes.from_json(one) for one in found["times"]])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        remedy = f"It was damaged ({error!r}); delete it, and measure again with scripts/bench/serving."
        raise UserError("step times", path, remedy) from error


def check_step_times(timing: Timing) -> Timing:
    """Return the times.

    Raises:
        UserError: they are of no concurrency, or of fewer than two draft lengths.
    """
    if not timing.times:
        remedy = "No step was timed; use longer completions with --max-new-tokens."
        raise UserError("step times", timing.source, remedy)
    known = timing.times[0].draft_lengths
    if len(known) < 2:
        remedy = "Two draft lengths are needed, three show the error: scripts/bench/serving ... -k 2 4 8."
        raise UserError("-k", known[0], remedy)
    return timing


def draft_lengths(evaluation: dict[str, Any], timing: Timing) -> list[DraftLengths]:
    """Return the choices for greedy drafts, which vLLM makes by default, at each temperature evaluated."""
    found = []
    for one in acceptances(evaluation):
        lengths = [row["k"] for row in one.measured["by_draft_length"]]
        if one.drafter != "trained" or one.drafts != GREEDY or lengths != list(range(1, len(lengths) + 1)):
            continue
        counts = one.measured["by_prompt"]
        resamples = acceptance_resamples(counts["drafts"], counts["accepted"])
        found.append(DraftLengths(one.temperature, [choose(resamples, times) for times in timing.times]))
    return found


def choice_table(found: Sequence[DraftLengths]) -> list[list[str]]:
    """Return a header and a row for each temperature and concurrency."""
    head = ["users", "temperature", "serve", "speed-up", "95 % interval", "tokens/s per user"]
    rows = [[*head, "fastest in resamples", "may be as fast"]]
    for at_temperature in found:
        for choice in at_temperature.choices:
            best = choice.best
            rows.append(
                [
                    str(choice.concurrency),
                    f"{at_temperature.temperature:g}",
                    length_name(best.k),
                    f"{best.speedup.value:.2f}x",
                    f"{best.speedup.low:.2f} to {best.speedup.high:.2f}" if best.k else "",
                    f"{best.tokens_per_second:.1f}",
                    f"{100 * choice.share:.0f} %",
                    ", ".join(_marked(choice.candidates[k]) for k in choice.rivals),
                ]
            )
    return rows


def length_name(k: int) -> str:
    return f"k = {k}" if k else PLAIN


def _marked(one: Candidate) -> str:
    return (str(one.k) if one.k else PLAIN) + ("" if one.covered else "*")


def speedup_table(at_temperature: DraftLengths) -> list[list[str]]:
    """Return a header, and a row for each draft length with the speed-up at each concurrency."""
    choices = at_temperature.choices
    rows = [["k", "acceptance length", *(f"{choice.concurrency} users" for choice in choices)]]
    for candidates in zip(*(choice.candidates for choice in choices), strict=True):
        cells = []
        for choice, one in zip(choices, candidates, strict=True):
            mark = "" if one.covered else "*"
            cells.append(f"{one.speedup.value:.2f}x{mark}" + (" <" if one == choice.best else "  "))
        first = candidates[0]
        rows.append([str(first.k) if first.k else PLAIN, f"{first.acceptance_length:.2f}", *cells])
    return rows


def step_table(timing: Timing) -> list[list[str]]:
    """Return a header, and the milliseconds of a step for each concurrency and known draft length."""
    rows = [["users", "k", "step, ms", "drafting, ms", "target and the rest, ms", "interpolation error"]]
    for times in timing.times:
        plain = median(times.plain)
        rows.append([str(times.concurrency), PLAIN, f"{plain:.2f}", "", f"{plain:.2f}", ""])
        error = times.interpolation_error()
        for k in times.draft_lengths:
            step = median(times.steps[k])
            drafting = median(times.drafting[k]) if k in times.drafting else None
            parts = ["", ""] if drafting is None else [f"{drafting:.2f}", f"{step - drafting:.2f}"]
            shown = "not known" if error is None else f"{100 * error:.1f} %"
            rows.append(["", str(k), f"{step:.2f}", *parts, shown if k == times.draft_lengths[-1] else ""])
    return rows


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def notes(found: Sequence[DraftLengths], timing: Timing) -> list[str]:
    """Return what limits the predictions."""
    said = ["The rates are those of decoding: reading the prompt is not included."]
    if any(not one.covered for at in found for choice in at.choices for one in choice.candidates):
        known = timing.times[0].draft_lengths
        said.append(
            f"* extrapolated, because the times are known for draft lengths {known[0]} to {known[-1]}; it is "
            "not recommended before it is measured."
        )
    for times in timing.times:
        for shorter, longer in times.contradictions():
            said.append(
                f"WARNING: at {times.concurrency} users a step took longer with {length_name(shorter)} than "
                f"with {length_name(longer)}. Other work disturbed the measurement; repeat it."
            )
    if all(one.interpolation_error() is None for one in timing.times):
        said.append("The error of interpolated times is not known: it takes three draft lengths.")
    return said


def commands(found: Sequence[DraftLengths], run_info: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (what for, command): one for each recommended draft length, and one for a varying load."""
    target, export = str(run_info["target"]), str(run_info["export"])
    loads: dict[int, list[str]] = {}
    for at in found:
        for choice in at.choices:
            loads.setdefault(choice.best.k, []).append(
                f"{choice.concurrency} at temperature {at.temperature:g}"
            )
    result = []
    for k, where in sorted(loads.items()):
        result.append((f"{length_name(k)}; users: {', '.join(where)}", serve_command(target, export, k)))
    for at in found:
        ranges = schedule(at.choices)
        if len(ranges) > 1:
            command = serve_command(target, export, max(k for _, _, k in ranges), batch_sizes=ranges)
            result.append((f"a load that varies, temperature {at.temperature:g}", command))
    return result


def choice_lines(evaluation: dict[str, Any], run_info: dict[str, Any], timing: Timing) -> list[str]:
    """Return the tables, notes and commands for a terminal."""
    found = draft_lengths(evaluation, timing)
    lines = [f"Times: {timing.source}", "", *aligned(step_table(timing), text_columns=1)]
    for at in found:
        lines += ["", f"Predicted speed-up, temperature {at.temperature:g} (< fastest)", ""]
        lines += aligned(speedup_table(at))
    lines += ["", *aligned(choice_table(found), text_columns=1), "", *notes(found, timing), ""]
    for what, command in commands(found, run_info):
        lines += [f"# {what}", command]
    return lines


def draft_length_panels(found: Sequence[DraftLengths]) -> dict[str, Panel]:
    """Return a panel for each temperature."""
    panels = {}
    for index, at in enumerate(found):
        name = f"serve_k_{index}"
        panels[name] = Panel(
            name,
            "Predicted speed-up by draft length",
            f"temperature {at.temperature:g}; shaded: 95 % interval; the fastest is marked, dashed is "
            "extrapolated",
            lambda axes, at=at: _draw(axes, at.choices),  # type: ignore[misc]
        )
    return panels


def _draw(axes: Axes, choices: Sequence[Choice]) -> None:
    axes.axhline(1, color=MUTED, linewidth=1, linestyle=(0, (1, 2.5)))
    labels = []
    for choice, color in zip(choices, ramp(len(choices), LIGHT_RAMP), strict=True):
        k = [one.k for one in choice.candidates]
        values = [one.speedup.value for one in choice.candidates]
        low, high = ([getattr(one.speedup, name) for one in choice.candidates] for name in ("low", "high"))
        axes.fill_between(k, low, high, color=color, alpha=0.15, linewidth=0)
        for left in range(len(k) - 1):
            covered = all(one.covered for one in choice.candidates[left : left + 2])
            style = "-" if covered else (0, (2, 1.5))
            axes.plot(k[left : left + 2], values[left : left + 2], color=color, linestyle=style)
        axes.plot(choice.best.k, choice.best.speedup.value, color=color, marker="o", markersize=7)
        users = "user" if choice.concurrency == 1 else "users"
        labels.append((f"{choice.concurrency} {users}", k[-1], values[-1], color))
    axes.set(xlabel="draft length k (tokens), 0: no drafter", ylabel="times the rate without a drafter")
    axes.set_xticks([one.k for one in choices[0].candidates])
    axes.set_ylim(bottom=0)
    label_ends(axes, labels)
