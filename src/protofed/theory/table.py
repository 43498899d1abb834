"""What `protofed explain --theory` prints."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

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
    "lam_max": "largest lam, for small lr",
    "rho_min": "least rho at this lr; 1: none",
    "change": "the loss changed in the round by, worst client",
    "change_max": "and by the theorem by at most",
    "holds": "condition holds",
}
SHOWN = 4  # rounds side by side


def guidance_table(console: Console, told: Mapping[str, Any]) -> None:
    """Constants and bounds round by round, then what to do."""
    _say(console, f"{told['which']}: {told['label']}")
    _say(console, f"measured on {told['source']}: {told['assumptions']}")
    if told.get("note"):
        _say(console, f"note: {told['note']}")
    rounds = _some(told["rounds"])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("", "what", *(f"round {entry['round']}" for entry in rounds)):
        table.add_column(title, justify="right" if title.startswith("round") else "left")
    for key, about in ROWS.items():
        if any(entry.get(key) is not None for entry in rounds):
            table.add_row(key, about, *(_cell(entry.get(key)) for entry in rounds))
    console.print(table)
    for line in advice(told):
        _say(console, line)


def _some(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first, the last and some between."""
    many = min(SHOWN, len(rounds))
    return [rounds[i * (len(rounds) - 1) // max(many - 1, 1)] for i in range(many)]


def advice(told: Mapping[str, Any]) -> list[str]:
    """What the numbers suggest, in words."""
    last, suggests = told["rounds"][-1], told["suggests"]
    other = "lam" if last["lam"] is not None else "rho"
    yours = f"yours: lr = {last['lr']:g}, {other} = {last[other]:g}"
    held = sum(bool(entry["holds"]) for entry in told["rounds"])
    lines = [f"{yours}; the condition holds in {held} of {len(told['rounds'])} measured rounds"]
    if "lr" in suggests and other in suggests:
        lines.append(f"suggested: lr {_span(suggests['lr'])} together with {other} {_span(suggests[other])}")
    else:
        alone = [entry["lr_max_alone"] for entry in told["rounds"] if entry["lr_max_alone"] is not None]
        small = f" Local training alone asks for lr up to {min(alone):.2g}." if alone else ""
        lines.append(f"suggested: nothing, because no lr and {other} satisfy all measured rounds.{small}")
    lines.append(
        "A condition that holds promises that the loss falls; one that does not promises nothing. Runs well beyond "
        "these bounds usually train, and near the end of a run, where gradients are small, no bound can hold."
    )
    return lines


def _span(span: list[float]) -> str:
    low, high = span
    return f"up to {high:.2g}" if low == 0 else f"from {low:.4g}" + (f" to {high:.2g}" if high != 1 else "")


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:.3g}"


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
