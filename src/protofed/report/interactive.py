"""A plot in the form that plotly.js takes: traces and a layout, without the colours of the page, which its script
adds."""

import html
from collections.abc import Iterable, Sequence
from functools import singledispatch
from typing import Any

import numpy as np

from protofed.report.figure import MOST_NAMED, Axis, Bars, Figure, Heat, Line, Panel, Plot, Points, Words, shorten
from protofed.report.style import counted

DIGITS = 5  # significant ones; a screen shows no more
TICKS = 10  # plotly draws no more of its own, so that those of longer axes are whole numbers


def short(values: Iterable[Any]) -> list[Any]:
    """Numbers with as many digits as can be seen; null for anything that is not a number."""
    return [_short(value) for value in values]


def _short(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return _safe(value) if value else value
    number = float(value)
    return float(f"{number:.{DIGITS}g}") if np.isfinite(number) else None


def _safe(text: str) -> str:
    """plotly reads a few HTML tags in texts; names are no HTML."""
    return html.escape(text, quote=False)


def figure(some: Figure) -> dict[str, Any]:
    """Everything that the page's script needs for a figure."""
    return {
        "id": some.id,
        "title": some.title,
        "caption": some.caption,
        "missing": some.missing,
        "notes": list(some.notes),
        "controls": [
            {"name": c.name, "options": list(c.options), "slider": c.slider, "start": c.start} for c in some.controls
        ],
        "key": [list(entry) for entry in some.key],
        "table": [list(row) for row in some.table],
        "columns": some.columns,
        "panels": [_panel(panel) for panel in some.panels],
    }


def _panel(panel: Panel) -> dict[str, Any]:
    plots = {key: plot(some) for key, some in panel.plots.items()}
    height = max(some.height for some in panel.plots.values())
    square = any(some.square for some in panel.plots.values())
    shape = {"wide": panel.wide, "height": height, "square": square}
    return {"title": panel.title, "label": panel.label, **shape, "plots": plots}


def plot(some: Plot) -> dict[str, Any]:
    """Traces and layout; a trace's `meta.label` names the method that hides it."""
    heat = next((mark for mark in some.marks if isinstance(mark, Heat)), None)
    layout: dict[str, Any] = {"xaxis": _axis(some.x, heat), "yaxis": _axis(some.y, heat), "barmode": "stack"}
    if heat is not None:
        _lay_out(layout, heat, some.square)
    lines = [mark for mark in some.marks if isinstance(mark, Line)]
    if counted(some.x.title) and heat is None and _long(some) < TICKS:
        layout["xaxis"]["dtick"] = 1
    if some.y.log:
        layout["yaxis"] |= _log_ticks([y for line in lines for y in line.y if y is not None and y > 0])
    layout["hovermode"] = "x unified" if lines and len(lines) == len(some.marks) else "closest"
    data = [one for mark in some.marks for one in traces(mark)]
    data.sort(key=lambda one: not one["meta"].get("band"))  # no band over another's line
    return {"data": data, "layout": layout}


def _lay_out(layout: dict[str, Any], heat: Heat, square: bool) -> None:
    """Axes of a heat map that end at its cells, and lines between its blocks."""
    rows, columns = heat.z.shape
    layout["yaxis"] |= {"range": [rows - 0.5, -0.5]}
    layout["xaxis"] |= {"range": [-0.5, columns - 0.5]}
    if square:
        layout["yaxis"] |= {"scaleanchor": "x", "constrain": "domain"}
        layout["xaxis"] |= {"constrain": "domain"}
    width = 1.2 if rows <= MOST_NAMED else 0.4
    if heat.above and rows > MOST_NAMED:
        layout["xaxis"]["showticklabels"] = False  # they are those of the other axis, and there is no room
        layout["yaxis"]["tickfont"] = {"size": 10}
    layout["shapes"] = [_break(at, side, width) for at in heat.breaks for side in "xy"]


def _long(some: Plot) -> float:
    """A line from one end of the horizontal axis to the other."""
    ends = some.x.range or [x for mark in some.marks if isinstance(mark, Line) for x in mark.x] or [0]
    return max(ends) - min(ends)


def _axis(axis: Axis, heat: Heat | None) -> dict[str, Any]:
    result: dict[str, Any] = {"title": {"text": _safe(axis.title)}, "automargin": True}
    if axis.log:
        result["type"] = "log"
    if axis.range is not None:
        result["range"] = short(axis.range)
    if axis.bare:
        result |= {"showticklabels": False, "showgrid": False, "showline": False, "ticks": ""}
    if axis.names is not None and axis.range is not None:  # numbers with names
        result |= {"tickvals": list(range(len(axis.names))), "ticktext": [_safe(n) for n in axis.names], "dtick": 1}
        result["range"] = result["range"][::-1]
    elif axis.names is not None:
        result |= {"type": "category", "categoryarray": [_safe(n) for n in axis.names], "autorange": "reversed"}
    elif heat is not None:
        result |= {"type": "category", "showgrid": False, "ticks": ""} | _ticks(heat)
    return result


def _ticks(heat: Heat) -> dict[str, Any]:
    """If classes have superclasses: their names in the middle of their blocks, if there are many classes."""
    if not heat.above:
        return {}
    blocks = heat.blocks() if len(heat.rows) > MOST_NAMED else list(enumerate(heat.rows))
    return {"tickvals": [int(at) for at, _ in blocks], "ticktext": [_safe(shorten(name)) for _, name in blocks]}


def _log_ticks(values: Sequence[float]) -> dict[str, Any]:
    """1, 2, 5, 10, ..., or only powers of ten if there would be many; plotly itself leaves out the zeros."""
    low, high = np.floor(np.log10(min(values))), np.ceil(np.log10(max(values)))
    powers = [10.0**e for e in np.arange(low, high + 1)]
    ticks = [m * power for power in powers for m in (1, 2, 5)] if len(powers) <= 3 else powers
    return {"tickvals": short(ticks), "ticktext": [f"{tick:g}" for tick in ticks]}


def _break(at: int, side: str, width: float) -> dict[str, Any]:
    """A line across a heat map before a row or a column."""
    other = "y" if side == "x" else "x"
    place = {f"{side}0": at - 0.5, f"{side}1": at - 0.5, f"{other}0": 0, f"{other}1": 1, f"{other}ref": "paper"}
    if side == "y":
        place["xref"] = "x domain"
    else:
        place["yref"] = "y domain"
    return {"type": "line", "line": {"width": width, "color": "#7f7f7f"}, **place}


@singledispatch
def traces(mark: Any) -> list[dict[str, Any]]:
    """One mark as the traces that draw it."""
    raise TypeError(f"cannot draw {type(mark).__name__}")


@traces.register
def _(mark: Line) -> list[dict[str, Any]]:
    meta = {"label": mark.label}
    x = short(mark.x)
    line = {
        "type": "scatter",
        "mode": "lines" if len(x) > 1 else "markers",
        "name": _safe(mark.name),
        "x": x,
        "y": short(mark.y),
        "line": {"color": mark.colour, "dash": mark.dash, "width": 2},
        "marker": {"color": mark.colour, "size": 7},
        "meta": meta,
        "hovertemplate": "%{y:.4~g}<extra>" + _safe(mark.name) + "</extra>",
    }
    if mark.low is None or mark.high is None:
        return [line]
    band = {
        "type": "scatter",
        "mode": "lines",
        "x": [*x, *x[::-1]],
        "y": short([*mark.high, *mark.low[::-1]]),
        "fill": "toself",
        "fillcolor": mark.colour,
        "opacity": 0.18,
        "line": {"width": 0, "color": mark.colour},
        "hoverinfo": "skip",
        "meta": meta | {"band": True},
    }
    return [band, line]


@traces.register
def _(mark: Bars) -> list[dict[str, Any]]:
    x, y = short(mark.x), short(mark.y)
    colours = mark.colours if isinstance(mark.colours, str) else list(mark.colours)
    value = "%{x:.4~g}" if mark.sideways else "%{y:.4~g}" + _safe(mark.unit)
    return [
        {
            "type": "bar",
            "name": _safe(mark.name),
            "x": y if mark.sideways else x,
            "y": x if mark.sideways else y,
            "orientation": "h" if mark.sideways else "v",
            "marker": {"color": colours, "line": {"width": 0}},
            "customdata": [_safe(text) for text in mark.hover or []],
            "hovertemplate": ("%{customdata}" + ("" if mark.sideways else f"<br>{value}") if mark.hover else value)
            + "<extra></extra>",
            "meta": {"label": mark.label},
        }
    ]


@traces.register
def _(mark: Words) -> list[dict[str, Any]]:
    return [
        {
            "type": "scatter",
            "mode": "text",
            "x": short(mark.x),
            "y": short(mark.y),
            "text": [f" {_safe(text)}" for text in mark.text],
            "textposition": "middle right",
            "hoverinfo": "skip",
            "cliponaxis": False,
            "meta": {"label": mark.label},
        }
    ]


@traces.register
def _(mark: Points) -> list[dict[str, Any]]:
    many = not isinstance(mark.sizes, float | int)
    marker: dict[str, Any] = {
        "color": mark.colours if isinstance(mark.colours, str) else list(mark.colours),
        "size": [round(float(size), 1) for size in mark.sizes] if many else mark.sizes,  # type: ignore[union-attr]
        "symbol": mark.symbol,
        "opacity": mark.opacity,
        "line": {"width": 0},
    }
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": _safe(mark.name),
            "x": short(mark.x),
            "y": short(mark.y),
            "marker": marker,
            "text": [_safe(text) for text in mark.hover or []],
            "hovertemplate": "%{text}<extra></extra>" if mark.hover else None,
            "meta": {"label": mark.label, "outline": mark.outline, "bubbles": many},
        }
    ]


@traces.register
def _(mark: Heat) -> list[dict[str, Any]]:
    return [
        {
            "type": "heatmap",
            "z": [short(row) for row in mark.z],
            "x": _distinct(_full(mark.columns, mark.above)),
            "y": _distinct(_full(mark.rows, mark.above)),
            "zmin": mark.low,
            "zmax": mark.high,
            "xgap": 0.5 if len(mark.columns) <= 30 else 0,
            "ygap": 0.5 if len(mark.rows) <= 30 else 0,
            "hovertemplate": f"%{{y}}, %{{x}}: %{{z:.4~g}} {_safe(mark.unit)}<extra></extra>",
            "colorbar": {"thickness": 10, "len": 0.9, "title": {"text": _safe(mark.unit), "side": "right"}},
            "meta": {"label": mark.label, "diverging": mark.diverging, "numbers": mark.numbers},
        }
    ]


def _full(names: Sequence[str], above: Sequence[str]) -> list[str]:
    return [f"{name} ({one})" for name, one in zip(names, above, strict=True)] if above else list(names)


def _distinct(names: Sequence[str]) -> list[str]:
    """plotly takes equal names for the same trace, so repeated ones get a blank."""
    seen: dict[str, int] = {}
    result = []
    for name in map(_safe, names):
        seen[name] = seen.get(name, 0) + 1
        result.append(name + "\u200b" * (seen[name] - 1))
    return result
