"""The report's page in a real browser: it draws, hides, moves, and asks nobody for anything."""

import base64
import io
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from chrome import opened
from command import protofed
from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from written import write_run

from protofed.report import html
from protofed.report.gather import gather

pytestmark = pytest.mark.browser
# What is drawn in a plot beside its axes; an area is more than nothing also where a line is level.
MARKS = """
const box = arguments[0];
const kinds = '.scatterlayer .js-line, .scatterlayer .point, .barlayer .point path, .heatmaplayer image';
const drawn = box.querySelectorAll(kinds);
return [...drawn].filter((mark) => { const b = mark.getBoundingClientRect(); return b.width * b.height > 0; }).length;
"""
PLOTS = "return [...document.querySelectorAll('.panel:not([hidden]) .plot')]"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with opened(tmp_path_factory.mktemp("profile"), performance="ALL") as driver:
        yield driver


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every figure: three methods, two seeds."""
    folder = tmp_path_factory.mktemp("made")
    names = ["<b>one</b>", "</script>", "three", "a very long name of a class", "five", "six"]
    for method, change in (("local", ()), ("fedproto", ()), ("fednh", ("model=cnn_digits",))):
        for seed in (0, 1):
            write_run(
                folder / "runs" / f"{method}{seed}",
                method,
                seed,
                names=names,
                changes=change,
                superclasses=["a", "b"] * 3,
            )
    page = folder / "page.html"
    page.write_text(html.page(gather([folder / "runs"])))
    return page


def drawn(browser: webdriver.Chrome, seconds: float = 120) -> None:
    """Wait until all plots are drawn."""
    end = time.monotonic() + seconds
    while browser.execute_script("return document.body.dataset.state") != "drawn":  # type: ignore[no-untyped-call]
        assert time.monotonic() < end, "the page does not finish drawing"
        time.sleep(0.05)


def visit(browser: webdriver.Chrome, page: Path, width: int = 1200, dark: bool = False) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(page.resolve().as_uri())
    drawn(browser)


def check_sound(browser: webdriver.Chrome) -> None:
    """No message in the console, and no request but for the file itself."""
    assert browser.get_log("browser") == []
    asked = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [each["params"]["request"]["url"] for each in asked if each["method"] == "Network.requestWillBeSent"]
    assert urls, "the log of requests is empty"
    own = "chrome:"  # of the browser's first tab, which may still be loading
    assert [url for url in urls if not url.startswith(("file:", "data:", own))] == []


def check_marks(browser: webdriver.Chrome) -> int:
    """Every plot shows more than its axes."""
    plots = browser.execute_script(PLOTS)
    for plot in plots:
        marks = browser.execute_script(MARKS, plot)
        where = browser.execute_script("return arguments[0].closest('section').id", plot)
        assert marks > 0, f"nothing is drawn in a plot of {where}"
    return len(plots)


def labels(browser: webdriver.Chrome) -> set[str]:
    """Methods that some plot shows a trace of."""
    script = PLOTS + ".flatMap((box) => box.data.map((trace) => trace.meta.label)).filter((label) => label)"
    return set(browser.execute_script(script))


def places(browser: webdriver.Chrome, section: str) -> list[str]:
    script = "return [...document.querySelectorAll(`#${arguments[0]} .point`)].map((p) => p.getAttribute('transform'))"
    found: list[str] = browser.execute_script(script, section)
    return found


def test_every_figure_is_drawn_without_errors_or_requests(browser: webdriver.Chrome, made: Path) -> None:
    visit(browser, made)
    assert check_marks(browser) == 1 + 3 + 2 + 3 + 2 + 3 + 3 + 2 + 1 + 2
    assert [some.text.split(".")[0] for some in browser.find_elements(By.CSS_SELECTOR, ".missing")] == [
        "No run was attacked"
    ]
    assert "<b>one</b>" in browser.find_element(By.ID, "similarity").text  # names are no HTML
    check_sound(browser)


def test_a_method_is_hidden_in_all_figures_at_once(browser: webdriver.Chrome, made: Path) -> None:
    visit(browser, made)
    assert labels(browser) == {"local", "fedproto", "fednh"}
    button = browser.find_element(By.CSS_SELECTOR, '.method[data-label="fedproto"]')
    button.click()
    drawn(browser)
    assert labels(browser) == {"local", "fednh"}
    heads = [head.text for head in browser.find_elements(By.CSS_SELECTOR, ".panel:not([hidden]) h3")]
    assert not any(head.startswith("fedproto") for head in heads)
    assert "fedproto" not in browser.find_element(By.CSS_SELECTOR, "#time .yaxislayer-above").text
    assert browser.find_element(By.CSS_SELECTOR, 'tr[data-label="fedproto"]').get_attribute("class") == "off"
    said = browser.find_elements(By.CSS_SELECTOR, ".away")
    assert not any(one.is_displayed() for one in said)
    for label in ("local", "fednh"):
        browser.find_element(By.CSS_SELECTOR, f'.method[data-label="{label}"]').click()
    drawn(browser)
    assert {one.text for one in said if one.is_displayed()} == {"All methods are hidden."}
    browser.find_element(By.ID, "all").click()
    drawn(browser)
    assert labels(browser) == {"local", "fedproto", "fednh"}
    check_sound(browser)


def test_the_slider_moves_points_and_choices_change_the_axes(browser: webdriver.Chrome, made: Path) -> None:
    visit(browser, made)
    last = places(browser, "embeddings")
    slider = browser.find_element(By.CSS_SELECTOR, "#embeddings input[type=range]")
    script = "arguments[0].value = 0; arguments[0].dispatchEvent(new Event('input'))"
    browser.execute_script(script, slider)
    drawn(browser)
    first = places(browser, "embeddings")
    assert len(first) == len(last)
    assert sum(a != b for a, b in zip(first, last, strict=True)) > len(first) / 2
    shown = browser.find_element(By.CSS_SELECTOR, "#embeddings output")
    assert shown.text == "1"
    play = browser.find_element(By.CSS_SELECTOR, "#embeddings button[title=Play]")
    browser.execute_script(f"arguments[1].click(); {script.replace('= 0', '= 2')}", slider, play)
    last_round = shown.text
    time.sleep(1.2)
    assert shown.text == last_round != "1", "a hand that moves the slider ends the play"
    browser.execute_script(script, slider)
    drawn(browser)
    for figure, option, expected in (("accuracy", "megabytes", "megabytes"), ("embeddings", "PCA", "")):
        browser.find_element(By.CSS_SELECTOR, f'#{figure} button[data-option="{option}"]').click()
        drawn(browser)
        titles = [title.text for title in browser.find_elements(By.CSS_SELECTOR, f"#{figure} .xtitle")]
        assert expected in "".join(titles)
    assert places(browser, "embeddings") != first
    check_sound(browser)


def test_new_data_is_shown_and_what_was_chosen_stays(browser: webdriver.Chrome, made: Path, tmp_path: Path) -> None:
    visit(browser, made)
    browser.find_element(By.CSS_SELECTOR, '#accuracy button[data-option="seconds"]').click()
    browser.find_element(By.CSS_SELECTOR, '.method[data-label="local"]').click()
    write_run(tmp_path / "local", "local", finished=False)
    write_run(tmp_path / "avg", "fedavg", changes=("model=cnn_digits",))
    browser.execute_script("update(arguments[0])", html.data(gather([tmp_path])))
    drawn(browser)
    assert "seconds" in browser.find_element(By.CSS_SELECTOR, "#accuracy .xtitle").text
    assert labels(browser) == {"fedavg"}
    browser.execute_script("update(arguments[0])", html.data(gather([])))
    drawn(browser)
    assert "Nothing to show yet" in browser.find_element(By.ID, "alerts").text
    check_sound(browser)


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone_by_day_and_by_night(browser: webdriver.Chrome, made: Path, dark: bool) -> None:
    visit(browser, made, width=390, dark=dark)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    colour = "return getComputedStyle(document.body).backgroundColor"
    assert browser.execute_script(colour) == ("rgb(18, 22, 27)" if dark else "rgb(255, 255, 255)")
    check_marks(browser)
    browser.find_element(By.ID, "theme").click()
    drawn(browser)
    assert browser.execute_script(colour) == ("rgb(255, 255, 255)" if dark else "rgb(18, 22, 27)")
    check_sound(browser)


WRITTEN = """
return [...document.querySelectorAll(`#${arguments[0]} .textpoint text`)].map((text) => {
  const b = text.getBoundingClientRect(), edge = text.closest('.plot').getBoundingClientRect().right;
  const across = [b.left, b.right, edge].map((x) => x + scrollX), down = (b.top + b.bottom) / 2 + scrollY;
  return [...across, down, getComputedStyle(text).fill];
});
"""


def luminance(rgb: Sequence[int]) -> float:
    parts = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1200])
def test_numbers_can_be_read_on_their_cells(browser: webdriver.Chrome, made: Path, width: int, dark: bool) -> None:
    visit(browser, made, width, dark)
    taken = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})["data"]
    picture = Image.open(io.BytesIO(base64.b64decode(taken))).convert("RGB")
    for section, count in (("confusion", 3 * 36), ("similarity", 2 * 36)):
        texts = browser.execute_script(WRITTEN, section)
        assert len(texts) == count
        for left, _, _, middle, fill in texts:
            back = picture.getpixel((int(left) - 2, int(middle)))
            low, high = sorted(map(luminance, ([int(c) for c in fill[4:-1].split(",")], back)))  # type: ignore[arg-type]
            assert (high + 0.05) / (low + 0.05) >= 4.5, f"{fill} on {back}"


def test_cells_tell_more_when_pointed_at(browser: webdriver.Chrome, made: Path) -> None:
    visit(browser, made)
    number = browser.find_element(By.CSS_SELECTOR, "#confusion .textpoint text")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", number)
    ActionChains(browser).move_to_element(number).perform()
    end = time.monotonic() + 10
    while not (hover := browser.find_elements(By.CSS_SELECTOR, "#confusion .hoverlayer .hovertext")):
        assert time.monotonic() < end, "nothing is told"
        time.sleep(0.05)
    assert "% of row" in hover[0].text


@pytest.mark.parametrize("width", [390, 800, 1200])
def test_words_beside_bars_are_whole(browser: webdriver.Chrome, tmp_path: Path, width: int) -> None:
    for lam in (1, 4):
        rounds = write_run(tmp_path / "runs" / str(lam), changes=(f"method.lam={lam}",)) / "rounds.jsonl"
        rounds.write_text(rounds.read_text().replace('"train": 0.2', '"train": 0.0144'))  # together 0.214 s
    page = tmp_path / "page.html"
    page.write_text(html.page(gather([tmp_path / "runs"])))
    visit(browser, page, width)
    for section, count in (("time", 2), ("traffic", 4)):
        texts = browser.execute_script(WRITTEN, section)
        assert len(texts) == count
        assert all(right <= edge for _, right, edge, _, _ in texts), section


def test_rounds_and_clients_are_counted_in_whole_numbers(browser: webdriver.Chrome, tmp_path: Path) -> None:
    write_run(tmp_path / "run", rounds=2, clients=4)
    page = tmp_path / "page.html"
    page.write_text(html.page(gather([tmp_path / "run"])))
    visit(browser, page)
    shown = {"accuracy": "1 2", "drift": "1 2", "clients": "1 2 3 4", "partition": "0 1 2 3"}
    for section, expected in shown.items():
        (plot, *_) = browser.find_elements(By.CSS_SELECTOR, f"#{section} .plot")
        ticks = [tick.text for tick in plot.find_elements(By.CSS_SELECTOR, ".xtick text")]
        assert ticks == expected.split(), section


def test_it_prints_in_light_colours_whatever_the_screen_has(browser: webdriver.Chrome, made: Path) -> None:
    visit(browser, made, dark=True)
    theme = "document.documentElement.dataset.theme"
    browser.execute_script(f"window.printed = []; addEventListener('beforeprint', () => printed.push({theme}))")
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True, "preferCSSPageSize": True})
    content = base64.b64decode(printed["data"])
    assert content.startswith(b"%PDF")
    assert len(content) > 50_000
    assert browser.execute_script("return printed") == ["light"]
    drawn(browser)
    assert browser.execute_script(f"return {theme}") == "dark"
    assert browser.find_elements(By.CSS_SELECTOR, "details[open]") == []  # as they were
    check_marks(browser)
    check_sound(browser)


def test_the_report_of_a_comparison(browser: webdriver.Chrome, tmp_path: Path) -> None:
    words = [
        "local",
        "fedproto",
        "--experiment",
        "demo",
        "clients=6",
        "rounds=2",
        "partition.shots=5",
        "--jobs",
        "1",
    ]
    done = protofed("compare", *words, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert f"report: {tmp_path / 'out' / 'report.html'}" in done.stdout.replace("\n", "")
    visit(browser, tmp_path / "out" / "report.html")
    assert labels(browser) == {"local", "fedproto"}
    drawn_here = {
        section.get_attribute("id") for section in browser.find_elements(By.CSS_SELECTOR, "section:has(.plot)")
    }
    assert drawn_here >= {"accuracy", "clients", "partition", "traffic", "time"}
    check_marks(browser)
    check_sound(browser)


def test_many_runs_stay_usable(browser: webdriver.Chrome, tmp_path: Path) -> None:
    methods = ("local", "fedavg", "fedprox", "fedper", "fedproto", "fednh", "fedpr", "ditto", "fedrep", "fedbabu")
    for method in methods:
        for seed in range(5):
            run: dict[str, Any] = {
                "rounds": 100,
                "clients": 100,
                "recorded": seed == 0,
                "changes": ("model=cnn_digits",),
            }
            folder = write_run(tmp_path / "runs" / f"{method}{seed}", method, seed, **run)
            (folder / "views.npz").unlink(missing_ok=True)  # eight projections would take most of the time
            every = {"global_accuracy": 0.5, "pm_v": 0.5, "pm_l": 0.5, "accuracy_proto_mean": 0.5}
            summary = json.loads((folder / "summary.json").read_text()) | every
            (folder / "summary.json").write_text(json.dumps(summary))
    write_run(
        tmp_path / "runs" / "long", "fednh", 0, changes=("method.rho=0.98765", "optimizer.weight_decay=0.00012345")
    )
    page = tmp_path / "page.html"
    page.write_text(html.page(gather([tmp_path / "runs"])))
    assert page.stat().st_size < 10_000_000
    visit(browser, page)
    fits = "const box = document.querySelector('#summary .scroll'); return box.scrollWidth <= box.clientWidth"
    assert browser.execute_script(fits), "the summary does not fit a screen"
    visit(browser, page, width=390)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    check_marks(browser)
    check_sound(browser)
