"""Colours that colour-blind people can tell apart, the same for a method in every figure."""

import colorsys
from collections.abc import Iterable
from typing import Any, NamedTuple

# Okabe and Ito's, without yellow and black, which vanish on one of the two backgrounds, and purple; then darker ones.
COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#7a4fbf",
    "#0b3c8c", "#8c2d04", "#1b5e20", "#a0186e", "#7d6b00", "#007a87", "#44596b", "#4a148c",
)  # fmt: skip
DARK = {
    "#0072b2": "#3d9be9", "#d55e00": "#f4703a", "#009e73": "#52c08a", "#cc79a7": "#e38bbb", "#e69f00": "#e6a81c",
    "#56b4e9": "#85d8f8", "#7f7f7f": "#8f8f8f", "#7a4fbf": "#9b78ff", "#0b3c8c": "#bcc6ff", "#8c2d04": "#ffb09c",
    "#1b5e20": "#7bf07f", "#a0186e": "#ff4fa8", "#7d6b00": "#e8ec58", "#007a87": "#22dccb", "#44596b": "#b7ad8c",
    "#4a148c": "#e05cf5", "#2b2f36": "#e8ebef",
}  # fmt: skip
"""Replacements for colours on a dark background, if they differ."""
SCALES = {
    "light": {
        "plain": [(0.0, "#f7fafc"), (0.5, "#6aaed6"), (1.0, "#08477f")],
        "two": [(0.0, "#b4500a"), (0.5, "#f7f7f7"), (1.0, "#0a5a9c")],
    },
    "dark": {
        "plain": [(0.0, "#1b222a"), (0.5, "#2f78ab"), (1.0, "#a6dbff")],
        "two": [(0.0, "#f0915a"), (0.5, "#1f262e"), (1.0, "#5bb4f0")],
    },
}
"""The colours of heat maps: from little to much, or in both directions from a middle."""
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
    """As many styles as needed: the first half of the colours with one kind of dash, the darker half with the next, and
    so on."""
    half = len(COLOURS) // 2
    return [Look(COLOURS[i % len(COLOURS)], DASHES[i // half % len(DASHES)]) for i in range(count)]


def ink(back: Iterable[float]) -> str:
    """Black or white, whichever is easier to read on a colour (sRGB, 0 to 1); the contrast is always 4.5 or more."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in back)
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else "#ffffff"


def counted(title: str) -> bool:
    """Whether the numbers of an axis count rounds or clients, and so are whole."""
    return title in ("round", "client") or title.endswith("from worst to best")


def class_colours(count: int) -> list[str]:
    """One colour per class; more than ten go round the colour wheel, light and dark in turn."""
    if count <= len(CLASSES):
        return list(CLASSES[:count])
    wheel = [colorsys.hls_to_rgb(i / count, (0.45, 0.6)[i % 2], 0.6) for i in range(count)]
    return ["#" + "".join(f"{round(255 * part):02x}" for part in rgb) for rgb in wheel]
