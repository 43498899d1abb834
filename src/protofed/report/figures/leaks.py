"""What the uploads of a run tell a curious server, as measured by `protofed attack`, next to the claimed epsilon."""

from collections.abc import Sequence
from typing import Any

from protofed.report.figure import Axis, Figure, Line, Panel, Plot
from protofed.report.groups import MISSING, Group
from protofed.report.runs import Run

NONE = "none"  # no budget


def make(groups: Sequence[Group]) -> Figure:
    title = "What uploads tell"
    attacked = [(group, run) for group in groups if (run := group.first(lambda run: run.leaks)) is not None]
    if not attacked:
        return Figure(
            "leaks", title, missing="No run was attacked. 'protofed attack RUN' measures what its uploads tell."
        )
    panels = [
        _panel(attacked, "Members told from others", "AUC", _members),
        _panel(attacked, "Inputs found", "gain in correlation", _gain),
    ]
    return Figure(
        id="leaks",
        title=title,
        caption="What a curious server gets from uploads, by the number of samples behind a prototype. Left: how well "
        "these samples are told from others of the class (0.5 is a guess). Right: how much more the inputs found by "
        "gradient descent correlate with the nearest sample behind the prototype than with the nearest of as many "
        "others (0: only the class is found). The table has in brackets the class mean as a guess, then the likeness "
        "to others. The attacker has the client's model, even where the method does not send it.",
        panels=[panel for panel in panels if panel is not None],
        table=_table(attacked),
    )


def _panel(attacked: Sequence[tuple[Group, Run]], title: str, axis: str, values: Any) -> Panel | None:
    lines = []
    for group, run in attacked:
        points = values(run.leaks)
        if points:
            x, y = zip(*points, strict=True)
            lines.append(Line(group.name, x, y, group.look.colour, group.look.dash, group.label))
    if not lines:
        return None
    return Panel({"": Plot(lines, Axis("samples behind a prototype", log=True), Axis(axis), height=280)}, title)


def _members(told: dict[str, Any]) -> list[tuple[float, float]]:
    return [(line["samples"], _best(line)["auc"]) for line in told["membership"] if line["size"]]


def _gain(told: dict[str, Any]) -> list[tuple[float, float]]:
    lines = [(line["samples"], _nearest(line)) for line in told["reconstruction"] if line["size"]]
    return [(samples, best["correlation"] - (best["other_correlation"] or 0.0)) for samples, best in lines]


def _nearest(line: dict[str, Any]) -> dict[str, Any]:
    """The attack that comes closest."""
    found: dict[str, Any] = max((line["likely"], line["smooth"]), key=lambda one: one["correlation"])
    return found


def _best(line: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = max((line["distance"], line["likelihood"]), key=lambda one: one["auc"])
    return found


def _table(attacked: Sequence[tuple[Group, Run]]) -> list[list[str]]:
    rows = [
        [
            "method", "samples", "epsilon claimed", "at least", "the server sees", "classes", "counts", "models",
            "PSNR, dB", "SSIM", "correlation", "AUC", "TPR at 1 %", "TPR at 0.1 %",
        ]
    ]  # fmt: skip
    for group, run in attacked:
        told = run.leaks
        images = {line["size"]: line for line in told["reconstruction"]}
        for line in told["membership"]:
            image, best = images.get(line["size"]), _best(line)
            size = str(line["size"]) if line["size"] else f"as sent ({line['samples']:g})"
            rows.append([
                group.label, size, *_epsilon(told["epsilon"]), told["view"], told["holdings"]["classes"],
                told["holdings"]["counts"], _models(told["model"]),
                _pair(image, "psnr", 1), _pair(image, "ssim", 2), _pair(image, "correlation", 2),
                f"{best['auc']:.3f}", _share(best["tpr_at_0.01"]), _share(best["tpr_at_0.001"]),
            ])  # fmt: skip
    return rows


def _models(told: dict[str, Any]) -> str:
    return "sent" if told["sent"] else "public" if told["public"] else "not sent"


def _epsilon(told: dict[str, Any] | None) -> tuple[str, str]:
    if told is None:
        return NONE, MISSING
    every = told["all_releases"]
    return tuple(MISSING if every[key] is None else f"{every[key]:.3g}" for key in ("claimed", "lower_bound"))  # type: ignore[return-value]


def _pair(line: dict[str, Any] | None, key: str, digits: int) -> str:
    if line is None:
        return MISSING
    best = _nearest(line)
    values = best[key], line["guess"][key], best[f"other_{key}"]
    return MISSING if None in values else "{:.{d}f} ({:.{d}f}; {:.{d}f})".format(*values, d=digits)


def _share(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.1f} %"
