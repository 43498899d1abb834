"""Whether the conditions of the convergence theorems hold, with constants estimated on the run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from protofed.report.figure import Axis, Figure, Line, Panel, Plot, thinned
from protofed.report.figures.accuracy import curve
from protofed.report.groups import MISSING, Group
from protofed.report.runs import Run
from protofed.runs.numbers import of_theorem

PANELS = {
    "lr": ("Step size", "step size", {"lr_max": "at most", "lr_min": "at least"}),
    "lam": ("Weight of the prototypes' loss", "lambda", {"lam_max": "at most"}),
    "rho": ("Inertia of the prototypes", "rho", {"rho_min": "at least"}),
    "grad_sq": ("Squared gradient", "squared norm", {}),
}
NUMBERS = ("L1", "L2", "G", "sigma2", "lr", "lr_min", "lr_max", "lam", "lam_max", "rho", "rho_min")


def make(groups: Sequence[Group]) -> Figure:
    guided = [Group(group.label, group.look, [_spread(run) for run in group.runs]) for group in groups]
    last = [(group, told[-1]) for group in guided if (told := _lines(group.runs[0]))]
    if not last:
        return Figure("theory", "Convergence guidance", missing="No run estimated the constants of a theorem.")
    panels = []
    for key, (title, axis, bounds) in PANELS.items():
        lines = [line for group, _ in last for line in _bounded(group, key, bounds)]
        if lines:
            log = all(value is not None and value > 0 for line in lines for value in line.y)  # a bound of 0 is none
            panels.append(Panel({"": Plot(lines, Axis("round"), Axis(axis, log=log), height=280)}, title))
    said = dict.fromkeys(f"{line.get('which', 'theorem')}: {line.get('assumptions', '')}" for _, line in last)
    return Figure(
        id="theory",
        title="Convergence guidance",
        caption="What was used (solid) against the bounds for which the theorem promises descent (dotted), with "
        "constants estimated in that round: the condition is met where, in all panels together, the solid line is on "
        "the right side of its dotted ones (below 'at most', above 'at least'). This is guidance and not proof: "
        "constants are estimated along the run, and the bounds are sufficient, not necessary.",
        panels=panels,
        columns=3,
        notes=[*said, *thinned(max(len(run.rounds) for group in guided for run in group.runs), "rounds")],
        table=_table(last),
    )


def _lines(run: Run) -> list[dict[str, Any]]:
    return [line["theory"] for line in run.rounds if line.get("theory")]


def _spread(run: Run) -> Run:
    """The theory's numbers as numbers of the rounds."""
    rounds = [{"round": line["round"], "theory": line.get("theory"), **_numbers(line)} for line in run.rounds]
    return replace(run, rounds=rounds)


def _numbers(line: dict[str, Any]) -> dict[str, Any]:
    """The values by round; a smallest lr of 0 counts as none."""
    found = {key: value for key, value in (line.get("theory") or {}).items() if isinstance(value, int | float)}
    return {key: value for key, value in found.items() if key != "lr_min" or value > 0}


def _bounded(group: Group, key: str, bounds: Mapping[str, str]) -> list[Line]:
    """The value that was used and its bounds; empty if there should be bounds but are none."""
    used = curve(group, key, dash="solid")
    found = [(curve(group, bound, dash="dot"), f"{group.label}, {word}") for bound, word in bounds.items()]
    dotted = [replace(line, low=None, high=None, name=name) for line, name in found if line is not None]
    return [] if used is None or (bounds and not dotted) else [replace(used, low=None, high=None), *dotted]


def _table(last: Sequence[tuple[Group, dict[str, Any]]]) -> list[list[str]]:
    known = {key for _, line in last for key, value in line.items() if value is not None}
    keys = [key for key in NUMBERS if key in known]
    rows = [["method", "condition, last round", *keys, "rounds in which it holds"]]
    for group, line in last:
        holds = [bool(some["holds"]) for run in group.runs for some in _lines(run) if some.get("holds") is not None]
        share = f"{100 * sum(holds) / len(holds):.0f} %" if holds else MISSING
        met = {True: "holds", False: "does not hold", None: MISSING}
        rows.append([group.label, met[line.get("holds")], *[of_theorem(key, line.get(key)) for key in keys], share])
    return rows
