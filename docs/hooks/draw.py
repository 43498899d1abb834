"""Draws the pictures of the concepts: `python docs/hooks/draw.py` writes docs/images/concepts/*.svg.

Colours are those of the page they stand in (light or dark), or of the system where there is no page.
"""

import html
from collections.abc import Callable
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parents[1] / "images" / "concepts"
CLASSES = ("#4269d0", "#e07b39", "#3ca951")
STYLE = """
#ID { --ink: var(--md-default-fg-color, #333); --soft: var(--md-default-fg-color--light, #777);
  --paper: var(--md-default-bg-color, #fff); font-family: var(--md-text-font-family, sans-serif); }
@media (prefers-color-scheme: dark) { #ID { --ink: var(--md-default-fg-color, #ddd);
  --soft: var(--md-default-fg-color--light, #aaa); --paper: var(--md-default-bg-color, #0d1117); } }
#ID text { fill: var(--ink); font-size: LETTERSpx; }
#ID .small { fill: var(--soft); font-size: SMALLpx; }
#ID .bold { font-weight: 700; }
#ID .box { fill: none; stroke: var(--soft); stroke-width: 1.5; }
#ID .line { fill: none; stroke: var(--ink); stroke-width: 1.6; }
#ID .head { fill: var(--ink); }
#ID .wall { fill: none; stroke: var(--ink); stroke-width: 2.5; stroke-dasharray: 9 6; }
"""


class Drawing:
    """An SVG, part by part."""

    def __init__(self, name: str, width: int, height: int, letters: int = 15) -> None:
        self.name, self.width, self.height, self.parts = name, width, height, list[str]()
        self.letters = letters  # pixels

    def add(self, text: str) -> None:
        self.parts.append(text)

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> None:
        for row, line in enumerate(words.split("\n")):
            self.add(
                f'<text x="{x:g}" y="{y + 18 * row:g}" text-anchor="{anchor}" class="{kind}">{html.escape(line)}</text>'
            )

    def box(self, x: float, y: float, width: float, height: float, words: str = "", kind: str = "") -> None:
        self.add(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" class="box"/>')
        if words:
            self.text(x + width / 2, y + height / 2 + 5 - 9 * words.count("\n"), words, kind)

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A straight arrow; its head is drawn, so that it takes the line's colour everywhere."""
        length = float(np.hypot(x2 - x1, y2 - y1))
        ux, uy = (x2 - x1) / length, (y2 - y1) / length
        left, right = (x2 - 11 * ux - 5 * uy, y2 - 11 * uy + 5 * ux), (x2 - 11 * ux + 5 * uy, y2 - 11 * uy - 5 * ux)
        self.add(f'<path class="line" d="M{x1:.1f} {y1:.1f}L{x2 - 8 * ux:.1f} {y2 - 8 * uy:.1f}"/>')
        self.add(
            f'<path class="head" d="M{x2:.1f} {y2:.1f}L{left[0]:.1f} {left[1]:.1f}L{right[0]:.1f} {right[1]:.1f}Z"/>'
        )

    def star(self, x: float, y: float, size: float, colour: str) -> None:
        angles = np.pi * np.arange(10) / 5 - np.pi / 2
        radii = np.where(np.arange(10) % 2 == 0, size, size * 0.45)
        points = " ".join(
            f"{x + r * np.cos(a):.1f},{y + r * np.sin(a):.1f}" for a, r in zip(angles, radii, strict=True)
        )
        self.add(f'<polygon points="{points}" fill="{colour}" stroke="var(--ink)" stroke-width="1"/>')

    def dot(self, x: float, y: float, colour: str, square: bool = False) -> None:
        shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5"'
        if square:
            shape = f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"'
        self.add(f'{shape} fill="{colour}" fill-opacity="0.55"/>')

    def svg(self) -> str:
        style = STYLE.replace("ID", f"pf-{self.name}")
        style = style.replace("LETTERS", str(self.letters)).replace("SMALL", str(round(self.letters * 13 / 15)))
        return (
            '<?xml version="1.0" encoding="utf-8"?>\n'
            f'<svg xmlns="http://www.w3.org/2000/svg" id="pf-{self.name}" viewBox="0 0 {self.width} {self.height}">'
            f"<style>{style}</style>\n" + "\n".join(self.parts) + "\n</svg>\n"
        )


def prototypes() -> Drawing:
    """Two clients' embeddings with class means, and the server's means of these."""
    d = Drawing("prototypes", 900, 330)
    _clients_and_server(d, ((10, 0), (320, 0), (630, 0)), ": embeddings stay here")
    d.text(140, 314, "a star: the mean of a class, its prototype", "small")
    d.text(760, 314, "a star: the mean of a class, its prototype", "small")
    d.text(450, 314, "class 1 is held by both", "small")
    d.arrow(272, 165, 318, 165)
    d.arrow(628, 165, 582, 165)
    return d


def prototypes_narrow() -> Drawing:
    """The same for phones: the clients above, the server below, and larger letters."""
    d = Drawing("prototypes-narrow", 560, 710, letters=22)
    _clients_and_server(d, ((10, 0), (150, 390), (290, 0)), "")
    d.text(280, 316, "a star: the mean of a class, its prototype", "small")
    d.text(280, 704, "class 1 is held by both", "small")
    d.arrow(140, 330, 190, 392)
    d.arrow(420, 330, 370, 392)
    return d


def _clients_and_server(d: Drawing, places: tuple[tuple[float, float], ...], more: str) -> None:
    """Three panels with these left upper corners; `more` comes after the clients' names."""
    (left_a, _), (middle, down), (left_b, _) = places
    centres = np.array([[80.0, 95.0], [185.0, 150.0], [90.0, 215.0]])
    found: dict[int, list[np.ndarray]] = {}
    generator = np.random.default_rng(3)
    for number, (left, name, held) in enumerate(((left_a, "client A", (0, 1)), (left_b, "client B", (1, 2)))):
        d.box(left, 40, 260, 250)
        d.text(left + 130, 28, f"{name}{more}", "bold")
        for c in held:
            shifted = centres[c] + (np.array([8, -12]) if number else np.array([-10, 10]))
            points = shifted + generator.normal(0, 17, (14, 2)) + np.array([left, 20])
            for x, y in points:
                d.dot(x, y, CLASSES[c], square=bool(number))
            mean = points.mean(0)
            d.star(*mean, 13, CLASSES[c])
            found.setdefault(c, []).append(mean - np.array([left, 0]))
    d.box(middle, down + 40, 260, 250)
    d.text(middle + 130, down + 28, "server: the mean by class", "bold")
    for c, means in found.items():
        for x, y in means:
            d.star(x + middle, y + down, 8, CLASSES[c])
        x, y = np.mean(means, axis=0) + np.array([middle, down])
        d.star(x, y, 14, CLASSES[c])
        d.text(x + 20, y + (26 if c == 1 else 5), f"class {c}", "small", "start")


def round_() -> Drawing:
    """One round, step by step."""
    d = Drawing("round", 900, 300)
    d.box(350, 15, 200, 62, "server\nprototypes, or a model", "bold")
    for x, name, model in ((40, "client 1", "CNN"), (350, "client 2", "MLP"), (660, "client 3", "ResNet")):
        d.box(x, 205, 200, 80)
        d.text(x + 100, 228, f"{name}: {model}", "bold")
        d.text(x + 100, 250, "2  trains on its own data", "small")
        d.text(x + 100, 270, "data and model stay", "small")
    d.arrow(380, 82, 150, 198)
    d.arrow(180, 200, 410, 84)
    d.arrow(435, 82, 435, 198)
    d.arrow(465, 200, 465, 84)
    d.arrow(520, 82, 750, 198)
    d.arrow(720, 200, 490, 84)
    d.text(215, 120, "1  down", "bold")
    d.text(360, 165, "3  up", "bold")
    d.text(690, 120, "1  down: the same for all", "bold", "start")
    d.text(575, 165, "3  up", "bold")
    d.text(570, 40, "4  combines what came up,", "", "start")
    d.text(570, 60, "class by class", "", "start")
    return d


def private() -> Drawing:
    """What crosses the line between a building and the server."""
    d = Drawing("private", 900, 270)
    d.add('<path class="wall" d="M620 10V260"/>')
    d.text(300, 28, "your building", "bold")
    d.text(770, 28, "the server", "bold")
    d.box(15, 60, 130, 70, "samples\nand labels")
    d.arrow(147, 95, 185, 95)
    d.box(190, 60, 120, 70, "body\n(your model)")
    d.arrow(312, 95, 350, 95)
    d.box(355, 60, 120, 70, "embeddings")
    d.arrow(415, 132, 415, 168)
    d.box(190, 175, 120, 60, "head")
    d.arrow(250, 132, 250, 173)
    d.box(345, 172, 165, 66, "mean of each class\n(+ a count)", "bold")
    d.arrow(512, 205, 665, 205)
    d.box(670, 172, 200, 66, "the sum over clients,\nclass by class", "bold")
    d.text(80, 160, "never leave", "small")
    d.text(415, 50, "never leave, one by one", "small")
    d.text(250, 255, "stays with FedProto; averaged with FedAvg", "small")
    d.text(632, 122, "with FedProto nothing\nelse crosses this line", "small", "start")
    return d


def mean_each() -> Drawing:
    """Two types of uploads."""
    d = Drawing("mean-each", 900, 260)
    for left, name, summed in ((20, "Mean", True), (480, "Each", False)):
        d.text(left + 190, 25, name, "bold")
        for i, y in enumerate((50, 115, 180)):
            d.box(left, y, 90, 46, f"client {i + 1}")
            d.star(left + 118, y + 23, 10, CLASSES[i])
            if summed:
                d.arrow(left + 134, y + 23, left + 196, 138 + (i - 1) * 9)
            else:
                d.arrow(left + 134, y + 23, left + 268, y + 23)
        if summed:
            d.add(f'<circle cx="{left + 215}" cy="138" r="17" class="box"/>')
            d.text(left + 215, 145, "+", "bold")
            d.arrow(left + 234, 138, left + 268, 138)
        d.box(left + 272, 50, 110, 176)
        d.text(left + 327, 74, "server", "bold")
        if summed:
            d.star(left + 327, 138, 14, "var(--soft)")
            d.text(left + 327, 180, "sees the sum", "small")
        else:
            for i in range(3):
                d.star(left + 300 + 27 * i, 138, 11, CLASSES[i])
            d.text(left + 327, 180, "sees every one", "small")
    d.text(215, 250, "may be added up on the way", "small")
    d.text(675, 250, "has to know who sent what", "small")
    return d


def choose() -> Drawing:
    """Questions that lead to a method."""
    d = Drawing("choose", 900, 400)

    def ask(x: float, y: float, words: str) -> None:
        d.box(x, y, 230, 62, words)

    def answer(x: float, y: float, words: str) -> None:
        d.add(f'<rect x="{x}" y="{y}" width="230" height="62" rx="8" fill="#4269d0" fill-opacity="0.16"/>')
        d.text(x + 115, y + 36 - 9 * words.count("\n"), words, "bold")

    ask(20, 10, "Do clients have\ndifferent models?")
    ask(20, 112, "Must the server see\nonly sums?")
    ask(20, 214, "Asked for classes never\nseen, or many domains?")
    ask(20, 316, "Is one global model\nwanted?")
    answer(650, 10, "FedProto")
    answer(335, 112, "FedNH, FedRep,\nFedAvg, FedPR, ...")
    answer(650, 214, "MP-FedCL, SP-FedCL")
    answer(650, 316, "FedNH")
    answer(335, 316, "FedNH, FedRep")
    for y, to in ((41, 646), (143, 331), (245, 646)):
        d.arrow(252, y, to, y)
        d.text(285, y - 7, "yes")
    for y in (74, 176, 278):
        d.arrow(135, y, 135, y + 36)
        d.text(152, y + 24, "no", "", "start")
    d.arrow(252, 347, 331, 347)
    d.text(290, 340, "no")
    d.add('<path class="line" d="M135 380V392H765"/>')
    d.arrow(765, 392, 765, 381)
    d.text(600, 386, "yes")
    d.text(650, 140, "leaves out FeSEM and the", "small", "start")
    d.text(650, 158, "pool methods; see the table", "small", "start")
    return d


# From top to bottom: each may import what is below it; tests/test_layers.py compares this with the sources.
LAYERS = (
    (("cli", "api", "federated"), "the front doors: commands and Python"),
    (("remote",), "real federations; Flower is in remote/flower only"),
    (("probes",), "what a run measures and draws besides training"),
    (("papers",), "the papers' tables, figures and theorems"),
    (("report",), "finished runs as tables and figures"),
    (("joining", "export", "explain", "tracking", "sweep", "testing"), "things to do with runs and methods"),
    (("leaks",), "attacks on what a run's clients send"),
    (("runs",), "a run: its rounds, folder and checkpoints"),
    (("robust",), "robust aggregation, and simulated attackers"),
    (("config",), "the experiment: its files, sections and keys"),
    (("engines",), "where clients run: reference, stacked, fused, Ray"),
    (("local", "metrics"), "one client's round, and its counters"),
    (("methods", "models", "data"), "the papers' algorithms, networks, samples"),
    (("privacy",), "secure sums, noise and privacy budgets"),
    (("ops",), "arithmetic that several papers share"),
    (("method",), "the contract of a method"),
    (("errors", "importing", "atomic", "version"), "errors, import paths, whole files"),
)


def layers() -> Drawing:
    """The packages, each of which imports only from those below it."""
    d = Drawing("layers", 900, 28 + 41 * len(LAYERS))
    for number, (names, about) in enumerate(LAYERS):
        y = 12 + 41 * number
        d.box(60, y, 400, 33)
        d.text(260, y + 22, " · ".join(names), "bold")
        d.text(485, y + 22, about, "small", "start")
    d.arrow(30, 20, 30, 41 * len(LAYERS))
    d.text(52, 24 + 41 * len(LAYERS), "imports go down only", "small", "start")
    return d


def data() -> Drawing:
    """FedProto's round as values: K clients, C classes, embeddings of width D."""
    d = Drawing("data", 900, 330)
    d.box(20, 110, 190, 90, "server\nprototypes (C, D)\nheld (C,)")
    d.box(355, 15, 300, 62, "client: params, buffers, memory\nbatches, counts (C,)")
    d.box(355, 120, 300, 70, "trained client\nclass means (C, D), held (C,)")
    d.box(355, 238, 300, 70, "sum over K clients: Mean\ntotal (C, D), weight (C,)")
    d.arrow(215, 120, 348, 55)
    d.text(225, 72, "broadcast,", "small")
    d.text(225, 90, "receive", "small")
    d.arrow(505, 82, 505, 114)
    d.text(520, 103, "loss, once a batch", "small", "start")
    d.arrow(505, 195, 505, 232)
    d.text(520, 219, "upload", "small", "start")
    d.arrow(348, 275, 215, 190)
    d.text(250, 262, "aggregate", "small")
    d.text(680, 45, "private:", "bold", "start")
    d.text(680, 65, "never leaves the client", "small", "start")
    d.text(680, 150, "what goes up is", "small", "start")
    d.text(680, 170, "a tree of Mean and Each", "small", "start")
    d.text(680, 268, "with Each, K rows", "small", "start")
    d.text(680, 288, "instead of a sum", "small", "start")
    return d


DRAWINGS: tuple[Callable[[], Drawing], ...] = (
    prototypes,
    prototypes_narrow,
    round_,
    private,
    mean_each,
    choose,
    layers,
    data,
)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for draw in DRAWINGS:
        drawing = draw()
        (FOLDER / f"{drawing.name}.svg").write_text(drawing.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
