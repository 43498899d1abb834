"""The report as one self-contained page, and its content as plain data."""

import json
import re
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from protofed.report import interactive, summary
from protofed.report.figure import Figure
from protofed.report.figures import figures
from protofed.report.gather import Gathered
from protofed.report.groups import group, incomparable, not_finished
from protofed.report.style import DARK, SCALES
from protofed.version import VERSION

Tell = Callable[[int, int], None]


def data(gathered: Gathered, tell: Tell | None = None) -> dict[str, Any]:
    """Everything that the page shows, ready for JSON; its script draws it with `update(data)`, at first and after each
    change."""
    return build(gathered, tell)[0]


def page(gathered: Gathered, tell: Tell | None = None, script: str = "") -> str:
    """The whole page; `script` runs after its own, for example one that fetches new data and calls `update`."""
    return render(data(gathered, tell), script)


def build(gathered: Gathered, tell: Tell | None = None) -> tuple[dict[str, Any], list[Figure]]:
    """The data of the page, and the figures that it was made from, for other ways of drawing."""
    groups = group(gathered.runs)
    drawn = list(figures(groups, tell)) if groups else []
    reasons = incomparable(groups)
    shown: dict[str, Any] = {
        "version": VERSION,
        "methods": [
            {"label": some.label, "name": some.name, "colour": some.look.colour, "dash": some.look.dash}
            for some in groups
        ],
        "dark": DARK,
        "scales": SCALES,
        "facts": summary.facts(groups),
        "incomparable": reasons,
        "unfinished": not_finished(groups),
        "left_out": [[str(folder), why] for folder, why in gathered.left_out],
        "remarks": [[str(folder), why] for folder, why in gathered.remarks],
        "headline": summary.headline(groups, not reasons),
        "summary": summary.summary_table(groups, not reasons),
        "settings": summary.settings(groups) if groups else None,
        "figures": [interactive.figure(some) for some in drawn],
        "environments": summary.environments(groups),
    }
    return shown, drawn


def render(shown: dict[str, Any], script: str = "") -> str:
    """The data, embedded in its page."""
    from plotly.offline import get_plotlyjs  # here, so that a machine that only trains can do without

    parts = {
        "style": _file("style.css"),
        "plotly": get_plotlyjs(),
        "data": json.dumps(shown, allow_nan=False, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
        "script": _file("page.js"),
        "more": script,
    }
    return re.sub(r"<!--(\w+)-->", lambda mark: parts[mark[1]], _file("template.html"))


def _file(name: str) -> str:
    return (files("protofed.report") / "page" / name).read_text(encoding="utf-8")
