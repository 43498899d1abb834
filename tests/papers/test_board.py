"""The leaderboard: its numbers are those of the entries, and a browser sorts them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from chrome import opened

from protofed.papers.reproduce import board
from protofed.papers.reproduce.entry import load_entry
from protofed.papers.reproduce.plan import cells_of
from protofed.papers.reproduce.result import EntryResult
from protofed.sweep import Cell

NAME = "natural/heart-disease"
ROWS = {"local": (0.5, 0.7, 2_000_000.0), "fedavg": (0.9, 0.8, 30_000_000.0), "lda": (0.75, 0.75, 100_000.0)}
PAGE = '<!doctype html><meta charset="utf-8"><script>{script}</script><h1>Board</h1>{body}'


def cells() -> dict[tuple[str, str], Cell]:
    return {(cell.labels["method"], cell.labels["seed"]): cell for cell in cells_of(load_entry(NAME))}


@pytest.fixture(scope="module")
def measured() -> EntryResult:
    """Two seeds of three methods."""
    rows = {
        row: {
            "own test, by head": [one, two],
            "own test, by prototype": [two, one],
            "MB sent": [sent, sent],
            "worst client": [one - 0.2, None],
        }
        for row, (one, two, sent) in ROWS.items()
    }
    runs = {cell.hash: 1.0 if row in ROWS and seed in "01" else None for (row, seed), cell in cells().items()}
    return EntryResult(NAME, "", [0, 1], rows, [], runs, "2 CPU cores", {})


def test_every_number_leads_to_its_runs(measured: EntryResult) -> None:
    page = board.board_page({NAME: measured})
    linked = set(re.findall(r'href="#(natural-heart-disease-\w+)"', page))
    assert linked == set(re.findall(r'<li id="([^"]+)"', page)) == {f"natural-heart-disease-{row}" for row in ROWS}
    assert "60.00 ± 10.00" in page
    assert "2.00 ± 0.00" in page, "megabytes"
    by_head, by_prototype = page.split("## ")[1:3]
    assert "70.00 ± 20.00" not in by_head
    assert re.search(r"<td>fedavg</td><td><a [^>]*>85.00 ± 5.00</a>†", by_head), "it judges by its classifier"
    assert "†" not in by_prototype
    (line,) = re.findall(r'<li id="natural-heart-disease-lda">.*', page)
    for seed in "01":
        assert cells()["lda", seed].hash in line
    assert cells()["lda", "2"].hash not in line, "which was not run"
    assert "configs/natural/heart_disease.toml" in line
    assert "<code>rounds=1</code>" in line
    assert f"protofed reproduce {NAME} --only method=lda" in line


def test_a_setting_that_is_not_measured_is_named_and_not_shown(measured: EntryResult) -> None:
    page = board.board_page({NAME: measured})
    assert page.count("<table") == 3
    assert "`natural/watches` (Eight people" in page.split(board.UNMEASURED)[1]
    assert "<table" not in board.board_page({})


def test_reported_numbers_stand_next_to_ours() -> None:
    name = "board/pfllib-fashion-pathological"
    entry = load_entry(name)
    rows: dict[str, dict[str, list[float | None]]] = {
        "fedavg": {"best round": [0.98], "global model, best round": [0.8]},
        "fedper": {"best round": [0.99], "own test, by head": [0.985]},
    }
    page = board.board_page({name: EntryResult(name, "", [0], rows, [], {}, "2 CPU cores", {})})
    own = page.split("## ")[-1]
    heads = re.findall(r'<th scope="col">([^<]*)</th>', own)
    lines = {cells[0]: cells for cells in (re.findall(r"<td>(.*?)</td>", line) for line in own.splitlines()) if cells}

    def cell(row: str, head: str) -> str:
        return re.sub("<[^>]*>", "", lines[row][heads.index(head)])

    assert "own test, by head (%), theirs" not in heads, "they report no such number"
    assert (cell("fedper", "best round (%)"), cell("fedper", "best round (%), theirs")) == ("99.00", "99.47")
    assert cell("fedavg", "best round (%), theirs") == "", "it is tested before training there"
    assert cell("fedavg", "global model, best round (%), theirs") == "80.41"
    assert entry.paper_number("fedavg", "best round") is None


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with opened(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.mark.browser
def test_a_click_sorts_and_a_number_opens_its_runs(measured: EntryResult, browser: Any, tmp_path: Path) -> None:
    text = board.board_page({NAME: measured})
    parts = [part for part in text.split("\n\n") if part.startswith(("<div", "<details"))]
    script = (ROOT / "docs" / "assets" / "sort.js").read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(PAGE.format(script=script, body="".join(parts)), encoding="utf-8")
    browser.get((tmp_path / "page.html").as_uri())
    own = browser.find_elements("css selector", "table")[2]
    heads = {head.text.split(" (")[0]: head for head in own.find_elements("css selector", "th")}

    def rows() -> list[str]:
        return [cell.text for cell in own.find_elements("css selector", "tbody td:first-child")]

    assert rows() == ["local", "fedavg", "lda"]
    heads["own test, by head"].click()
    assert rows() == ["fedavg", "lda", "local"]
    heads["own test, by head"].click()
    assert rows() == ["local", "lda", "fedavg"]
    heads["MB sent"].click()
    assert rows() == ["fedavg", "local", "lda"], "30, 2 and 0.1 MB: by number, not by letter"
    next(head for name, head in heads.items() if name.startswith("method")).click()
    assert rows() == ["fedavg", "lda", "local"]
    runs = browser.find_element("css selector", "details")
    assert not runs.get_attribute("open")
    own.find_element("css selector", "tbody td a").click()
    assert runs.get_attribute("open")
    assert not [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]
