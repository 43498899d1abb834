"""What was reconstructed, as a picture."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw
from torch import Tensor

from protofed.atomic import write_atomically

COLUMNS = 8  # prototypes in a row
SIDE = 64  # pixels of a tile at least
GAP, TEXT = 4, 16
LINES = {
    "sample": "nearest sample behind it",
    "likely": "found, by a likely input",
    "smooth": "found, by a smooth picture",
    "guess": "the class mean, a guess",
}


class Tile(NamedTuple):
    """One reconstruction; pictures (C, H, W) with values from 0 to 1."""

    size: int  # samples behind the prototype; 0: as it was sent
    sample: Tensor
    likely: Tensor
    smooth: Tensor
    guess: Tensor


def draw_shown(shown: Sequence[Tile], path: Path) -> None:
    """Lines of pictures for each class size: the nearest sample, what each attack found, and the mean of the class."""
    sizes = sorted({one.size for one in shown})
    by_size = {size: [one for one in shown if one.size == size][:COLUMNS] for size in sizes}
    zoom = max(1, -(-SIDE // shown[0].sample.shape[-1]))
    side = zoom * max(one.sample.shape[-1] for one in shown) + GAP
    width = GAP + max(len(some) for some in by_size.values()) * side
    high = len(sizes) * (TEXT + len(LINES) * (side + TEXT) + GAP)
    sheet = Image.new("RGB", (max(width, 280), high), "white")
    pen = ImageDraw.Draw(sheet)
    top = 0
    for size, some in by_size.items():
        what = f"{size} sample{'s' * (size > 1)} behind each prototype" if size else "prototypes as they were sent"
        pen.text((GAP, top + 2), what, fill="black")
        top += TEXT
        for part, line in LINES.items():
            pen.text((GAP, top + 2), line, fill="#555555")
            for place, one in enumerate(some):
                sheet.paste(_tile(getattr(one, part), zoom), (GAP + place * side, top + TEXT))
            top += side + TEXT
        top += GAP
    content = io.BytesIO()
    sheet.save(content, "PNG")
    write_atomically(path, content.getvalue())


def _tile(picture: Tensor, zoom: int) -> Image.Image:
    pixels = (picture.nan_to_num().clamp(0, 1) * 255).round().byte()
    pixels = pixels.expand(3, *pixels.shape[1:]) if len(pixels) == 1 else pixels
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    return image.resize((image.width * zoom, image.height * zoom), Image.Resampling.NEAREST)
