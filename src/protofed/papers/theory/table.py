"""What `protofed explain --theory` prints."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from protofed.runs.numbers import below_one, digits_below_one, of_theorem
from protofed.runs.progress import say_on

ROWS = {
    "L1": "smoothness of the local loss",
    "L2": "how far an embedding moves, per distance of weights",
    "G": "size of a stochastic gradient",
    "sigma2": "variance of the stochastic gradients",
    "grad_sq": "squared gradient, mean over a round's steps, least client",
    "pull": "slope of the distance in the prototypes",
    "averaging": "what averaging the bodies costs, a step",
    "turning": "what turning the prototypes costs, over 1 - rho",
    "lr_max_alone": "largest lr for local training alone",
    "lr_max": "largest lr as things are; 0: none",
    "lr_min": "least lr as things are",
    "lam_max": "largest lam, for small lr",
    "rho_min": "least rho at this lr",
    "change": "the loss changed in the round by, worst client",
    "change_max": "and by the theorem by at most",
    "holds": "condition holds",
}
SHOWN = 4  # rounds side by side


def guidance_table(console: Console, told: Mapping[str, Any]) -> None:
    """Constants and bounds round by round, then what to do."""
    say_on(console, f"{told['which']}: {told['label']}")
    say_on(console, f"measured on {told['source']}: {told['assumptions']}")
    if told.get("note"):
        say_on(console, f"note: {told['note']}")
    rounds = _some(told["rounds"])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("", "what", *(f"round {entry['round']}" for entry in rounds)):
        table.add_column(title, justify="right" if title.startswith("round") else "left")
    for key, about in ROWS.items():
        if any(entry.get(key) is not None for entry in rounds):
            table.add_row(key, about, *(of_theorem(key, entry.get(key)) for entry in rounds))
    console.print(table)
    for line in advice(told):
        say_on(console, line)


def _some(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first, the last and some rounds in between."""
    many = min(SHOWN, len(rounds))
    return [rounds[i * (len(rounds) - 1) // max(many - 1, 1)] for i in range(many)]


def advice(told: Mapping[str, Any]) -> list[str]:
    """What the numbers suggest, in words."""
    last, suggests = told["rounds"][-1], told["suggests"]
    other = "lam" if last["lam"] is not None else "rho"
    yours = f"yours: lr = {last['lr']:g}, {other} = {below_one(last[other]) if other == 'rho' else f'{last[other]:g}'}"
    held = sum(bool(entry["holds"]) for entry in told["rounds"])
    unknown = sum(entry["holds"] is None for entry in told["rounds"])
    lines = [f"{yours}; the condition holds in {held} of {len(told['rounds'])} measured rounds"]
    if "lr" in suggests and other in suggests:
        lines.append(f"suggested: lr {_span(suggests['lr'])} together with {other} {_span(suggests[other])}")
    elif unknown:
        lines.append(f"suggested: nothing, because the constants of {unknown} of these rounds are unknown.")
    else:
        alone = [entry["lr_max_alone"] for entry in told["rounds"] if entry["lr_max_alone"] is not None]
        small = f" Local training alone asks for lr up to {min(alone):.2g}." if alone and min(alone) > 0 else ""
        lines.append(f"suggested: nothing, because no lr and {other} satisfy all measured rounds.{small}")
    lines.append(
        "A condition that holds promises that the loss falls in expectation, if the constants were right; one that "
        "does not promises nothing. Runs well beyond these bounds usually train, and near the end of a run, where "
        "gradients are small, no bound can hold."
    )
    return lines


def _span(span: list[float]) -> str:
    """A bound rounded inwards, so that the printed number satisfies the condition too."""
    low, high = span
    if high == 1:
        return f"from {_rounded(low, digits_below_one(low), math.ceil)}"
    top = _rounded(high, 2, math.floor)
    return f"up to {top}" if low == 0 else f"from {_rounded(low, 4, math.ceil)} to {top}"


def _rounded(value: float, digits: int, way: Callable[[float], int]) -> str:
    """This many significant digits, rounded up or down."""
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1) if value > 0 else 1.0
    slack = 1e-9 if way is math.floor else -1e-9  # a number of so few digits stays as it is
    return f"{way(value / unit + slack) * unit:.{digits}g}"
