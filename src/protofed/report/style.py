"""Colours that the colour-blind can tell apart, the same for a method in every figure."""

import colorsys
from typing import NamedTuple

# Okabe and Ito's, without yellow and black, which vanish on one of the two backgrounds; the darkest first.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
DARK = {"#0072b2": "#4da6e0", "#d55e00": "#f0824a", "#009e73": "#2fc29a", "#7f7f7f": "#a8a8a8", "#2b2f36": "#e8ebef"}
"""What stands for a colour on a dark background, where it is another."""
DASHES = ("solid", "dash", "dot", "dashdot")
CLASSES = (
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee7733", "#009988", "#997700", "#8c8c8c",
)  # fmt: skip
PARTS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#9a9a9a", "#56b4e9", "#d55e00")


class Look(NamedTuple):
    """How a method is drawn."""

    colour: str
    dash: str


def looks(count: int) -> list[Look]:
    """As many as are needed; after the last colour the dashes change."""
    return [Look(COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]) for i in range(count)]


def class_colours(count: int) -> list[str]:
    """One a class; more than ten go round the colour wheel, light and dark in turn."""
    if count <= len(CLASSES):
        return list(CLASSES[:count])
    wheel = [colorsys.hls_to_rgb(i / count, (0.45, 0.6)[i % 2], 0.6) for i in range(count)]
    return ["#" + "".join(f"{round(255 * part):02x}" for part in rgb) for rgb in wheel]
