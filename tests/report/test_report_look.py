"""How the report's figures look: colours, numbers, legends and letters that can be read."""

import itertools
import warnings
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from PIL import Image
from written import write_run

from protofed.cli.report import write_report
from protofed.report import html, interactive, paper, pictures
from protofed.report.figure import Axis, Figure, Heat, Line, Panel, Plot
from protofed.report.gather import gather
from protofed.report.style import COLOURS, DARK, PARTS, ink, looks


def xyz(colour: Any) -> np.ndarray:
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear


def contrast(one: Any, other: Any) -> float:
    """As WCAG has it."""
    low, high = sorted((xyz(one)[1], xyz(other)[1]))
    return float((high + 0.05) / (low + 0.05))


def apart(one: str, other: str) -> float:
    """The distance in CIELAB (CIE76); none of the colours is so dark that its cube roots are lines."""
    x, y, z = np.cbrt(np.stack([xyz(one), xyz(other)]) / [0.9505, 1.0, 1.089]).T
    return float(np.linalg.norm(np.diff([116 * y, 500 * (x - y), 200 * (y - z)])))


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("colours", [COLOURS, PARTS])
def test_colours_can_be_told_apart_by_day_and_by_night(colours: tuple[str, ...], dark: bool) -> None:
    shown = [DARK.get(colour, colour) if dark else colour for colour in colours]
    for one, other in itertools.combinations(shown, 2):
        same_dash = one in shown[:8] and other in shown[:8]
        assert apart(one, other) > (26 if same_dash else 20), f"{one} and {other} look alike"
    for colour in shown:
        assert contrast(colour, "#12161b" if dark else "#ffffff") > (5 if dark else 2.2), colour


def test_ink_can_be_read_on_every_colour() -> None:
    for back in itertools.product(np.linspace(0, 1, 9), repeat=3):
        assert contrast(ink(back), back) >= 4.5, back


@pytest.mark.parametrize("diverging", [False, True])
def test_numbers_of_a_heat_map_for_papers_can_be_read(diverging: bool) -> None:
    z = np.linspace(-1, 1, 49).reshape(7, 7)
    names = [str(i) for i in range(7)]
    heat = Heat(z, names, names, "", -1, 1, diverging=diverging, numbers=".1f")
    with mpl.rc_context(paper.STYLE):
        axes = paper.draw(Figure("heat", "", panels=[Panel({"": Plot([heat], square=True)})]), "").axes[0]
    image = axes.images[0]
    assert len(axes.texts) == z.size
    for value, text in zip(z.flat, axes.texts, strict=True):
        assert contrast(text.get_color(), image.cmap(image.norm(value))) >= 4.5, value


def curves_of(names: list[str]) -> Figure:
    lines = [
        Line(name, [1, 2, 3], [i, i + 1, i + 2], look.colour, look.dash, name)
        for i, (name, look) in enumerate(zip(names, looks(len(names)), strict=True))
    ]
    return Figure("curves", "Curves", panels=[Panel({"": Plot(lines, Axis("round"), Axis("%", range=(0, 40)))})])


@pytest.mark.parametrize(
    "names",
    [
        ["a", "b"],
        [f"fedproto, lam={i / 10}, lr=0.0{i}" for i in range(6)],
        [f"a method with a long name, which somebody liked, and number {i}" for i in range(34)],
        ["short", "x" * 300],
        ["short", "漢" * 100],
    ],
)
def test_a_legend_is_as_wide_as_its_figure_at_most_and_leaves_the_plot_its_size(
    tmp_path: Path, names: list[str]
) -> None:
    with mpl.rc_context(paper.STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that no font has
        alone, many = (paper.draw(curves_of(some), "") for some in (names[:1], names))
        for canvas in (alone, many):
            canvas.canvas.draw()
    before, after = (canvas.axes[0].get_window_extent() for canvas in (alone, many))
    assert after.size == pytest.approx(before.size, rel=0.04)
    texts = [text.get_text() for text in many.legends[0].get_texts()]
    assert ["".join(text.split()) for text in texts] == ["".join(name.split()) for name in names]
    paper.save([curves_of(names)], tmp_path, note=lambda _: None)
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.width / 300 == pytest.approx(5.4, abs=0.2)


def test_a_legend_of_short_names_is_one_line() -> None:
    with mpl.rc_context(paper.STYLE):
        assert paper.draw(curves_of(["a", "b", "c", "d", "e", "f"]), "").legends[0]._ncols == 6


def check_whole(axes: Axes) -> None:
    ticks = axes.get_xticks()
    assert len(ticks)
    np.testing.assert_array_equal(ticks, np.round(ticks))


@pytest.mark.parametrize("rounds", [1, 2, 4, 12])
def test_rounds_and_clients_are_whole_numbers(tmp_path: Path, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run", rounds=rounds, clients=4)
    kept: list[Any] = []
    monkeypatch.setattr(paper, "write_one", lambda figure, *_, **__: kept.append(figure))
    (run,) = gather([folder]).runs
    pictures.draw_comparison({"fedproto": [run.rounds]}, tmp_path / "compare.png")
    with mpl.rc_context(paper.STYLE):
        check_whole(paper.draw(kept[0], "").axes[0])
    _, drawn = html.build(gather([folder]))
    seen = set()
    for some in drawn:
        plots = [(key, plot) for panel in some.panels for key, plot in panel.plots.items()]
        for key, plot in plots:
            if plot.x.title in ("round", "client", "clients, from worst to best"):
                seen.add(plot.x.title)
                axis = interactive.plot(plot)["layout"]["xaxis"]
                assert (axis.get("dtick") == 1) == (plot.x.title != "round" or rounds <= 10), some.id
                with mpl.rc_context(paper.STYLE):
                    check_whole(paper.draw(some, key).axes[0])
            else:
                assert "dtick" not in interactive.plot(plot)["layout"]["xaxis"], plot.x.title
    assert len(seen) == 3


def test_letters_that_the_usual_font_lacks_are_taken_from_another(tmp_path: Path) -> None:
    assert paper.fallbacks(set("fedproto, λ=1")) == ([], set())
    fonts, lacking = paper.fallbacks(set("fedproto ⌸"))  # which Matplotlib's own DejaVu Sans Mono has
    assert len(fonts) == 1
    assert not lacking
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paper.save([curves_of(["a", "⌸"])], tmp_path, note=pytest.fail)
    assert fonts[0] in (tmp_path / "curves.svg").read_text()


def test_letters_that_no_font_has_are_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [font for font in font_manager.fontManager.ttflist if "mpl-data" in font.fname]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", own)
    some = gather([write_run(tmp_path / "run", names=["漢字", "字", "c", "d", "e", "f"])])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_report(some, tmp_path / "page.html", tmp_path / "figures")
    said = [line for line in capsys.readouterr().err.splitlines() if "note" in line]
    assert len(said) == 1
    assert "no installed font has 字 漢" in said[0]


def test_no_band_lies_over_a_line() -> None:
    lines = [Line(name, [1, 2], [3, 4], "#000000", low=[2, 3], high=[4, 5]) for name in "ab"]
    drawn = interactive.plot(Plot(lines, Axis("round"), Axis("accuracy")))["data"]
    assert [bool(trace["meta"].get("band")) for trace in drawn] == [True, True, False, False]
