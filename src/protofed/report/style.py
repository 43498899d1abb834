"""Colours that the colour-blind can tell apart, the same for a method in every figure."""

import colorsys
from typing import Any, NamedTuple

# Okabe and Ito's, without yellow and black, which vanish on one of the two backgrounds, and purple; then darker ones.
COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#7a4fbf",
    "#0b3c8c", "#8c2d04", "#1b5e20", "#a0186e", "#7d6b00", "#007a87", "#44596b", "#4a148c",
)  # fmt: skip
DARK = {
    "#0072b2": "#4da6e0", "#d55e00": "#f0824a", "#009e73": "#2fc29a", "#7f7f7f": "#a8a8a8", "#7a4fbf": "#a583ea",
    "#0b3c8c": "#a9c8ff", "#8c2d04": "#ffbd9b", "#1b5e20": "#a5e0a9", "#a0186e": "#ff7cc4", "#7d6b00": "#d8cb5a",
    "#007a87": "#63dbe6", "#44596b": "#b9cbdb", "#2b2f36": "#e8ebef", "#4a148c": "#d7c2ff",
}  # fmt: skip
"""What stands for a colour on a dark background, where it is another."""
LINES: dict[str, Any] = {"solid": "-", "dash": (0, (4, 2)), "dot": (0, (1, 1.2)), "dashdot": (0, (5, 2, 1, 2))}
"""The kinds of lines by plotly's names, as matplotlib takes them."""
DASHES = tuple(LINES)
CLASSES = (
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee7733", "#009988", "#997700", "#8c8c8c",
)  # fmt: skip
PARTS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#9a9a9a", "#56b4e9", "#d55e00")


class Look(NamedTuple):
    """How a method is drawn."""

    colour: str
    dash: str


def looks(count: int) -> list[Look]:
    """As many as are needed; half the colours are drawn with one kind of dash, the darker ones with the next."""
    half = len(COLOURS) // 2
    return [Look(COLOURS[i % len(COLOURS)], DASHES[i // half % len(DASHES)]) for i in range(count)]


def class_colours(count: int) -> list[str]:
    """One a class; more than ten go round the colour wheel, light and dark in turn."""
    if count <= len(CLASSES):
        return list(CLASSES[:count])
    wheel = [colorsys.hls_to_rgb(i / count, (0.45, 0.6)[i % 2], 0.6) for i in range(count)]
    return ["#" + "".join(f"{round(255 * part):02x}" for part in rgb) for rgb in wheel]
