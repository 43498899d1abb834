"""The documentation: it builds without a network and without a warning, its links hold, and its code runs."""

import dataclasses
import html.parser
import re
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest
from blocks import blocks, run_page
from checkout import ROOT
from command import protofed

from protofed import METHODS, UserError

pytestmark = pytest.mark.docs

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BUILD = """
import socket, sys
def refuse(*args, **kwargs):
    raise OSError("the build asked for the network")
socket.socket.connect = socket.getaddrinfo = refuse
from mkdocs.__main__ import cli
cli(sys.argv[1:])
"""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="needs the site's tools: pip install 'protofed[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


class Read(html.parser.HTMLParser):
    """What a page points to, which places it has, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.places |= {value for key, value in attrs if key in ("id", "name") and value}
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))
        loads = given.get("src") or (given.get("href") if tag == "link" else None)
        if loads:
            self.loaded.append(loads)


def test_the_site_holds_together(site: Path) -> None:
    """Every link and every anchor leads somewhere, and no page loads anything from elsewhere."""
    pages = {path: Read(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) >= len(PAGES)
    checked = 0
    for path, page in pages.items():
        for link in page.links + page.loaded:
            where = urllib.parse.urlsplit(link)
            if where.scheme or where.netloc:
                assert link not in page.loaded, f"{path.name} loads {link}"
                continue
            target = (path.parent / urllib.parse.unquote(where.path)).resolve() if where.path else path
            assert target.is_file(), f"{path.name}: {link}"
            if where.fragment and target in pages:
                assert urllib.parse.unquote(where.fragment) in pages[target].places, f"{path.name}: {link}"
                checked += 1
    assert checked > 500
    assert (site / "search" / "search_index.js").is_file()  # search from disk


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(DOCS))) for page in PAGES])
def test_equations_are_drawn_and_no_code(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    spans = [span for line in text.splitlines() for span in re.findall(r"`([^`\n]+)`", line)]
    assert not [span for span in spans if set(span) & set("∇Σ√‖≤≥²σηλρε") or "\\|" in span]


def test_every_method_has_a_page_made_of_its_code(site: Path) -> None:
    for name, kind in METHODS.items():
        text = (site / "methods" / f"{name}.html").read_text(encoding="utf-8")
        assert "<math" in text
        assert not re.search(r"<!-- \w+ -->", text), name
        for key in (field.name for field in dataclasses.fields(kind)):
            assert f"<code>{key}</code>" in text, f"{name}: {key}"
        source = (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8")
        unmeasured = "Our studies do not have this method yet." in text or "<!-- measured -->" not in source
        assert "own test" in text or unmeasured
    assert "844 to 1,110" in (site / "methods" / "fedproto.html").read_text()  # as `explain` counts in the demo


def test_pictures_are_those_of_the_script(tmp_path: Path) -> None:
    code = f"import draw, pathlib; draw.FOLDER = pathlib.Path({str(tmp_path)!r}); draw.main()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=DOCS / "hooks")
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert drawn == {path.name: path.read_text() for path in (DOCS / "images" / "concepts").glob("*.svg")}


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(DOCS))) for page in PAGES])
def test_the_code_of_a_page_runs(page: Path) -> None:
    run_page(page, {"run": ["rounds=2"]} if page.stem in ("export", "index", "join") else None)  # twenty there


def test_the_benchmark_of_the_page_runs() -> None:
    done = protofed("bench", "digits-100", "model=mlp_digits", "clients=10", "--rounds", "1")
    assert done.returncode == 0, done.stderr


def test_a_page_that_is_wrong_is_noticed() -> None:
    """The machinery itself: order, files, names in common, and every kind of mistake."""
    good = "```python\n# two.py\ntwo = 2\n```\ntext\n```toml\n# a.toml\nx = 1\n```\n```bash\ncat a.toml # there\n```\n"
    more = "```python\nimport two as other\nassert other.two == two\n```\n```text\nnot run\n```\n"
    Path("good.md").write_text(good + more)
    assert run_page(Path("good.md")) == 4
    assert [block.language for block in blocks(good + more)] == ["python", "toml", "bash", "python", "text"]
    wrong = {
        "bash": ["protofed run nothing", "make nothing", "pip install 'protofed[nothing]'", "false"],
        "python": ["assert False", "nothing"],
        "toml": ["nothing = 1"],
    }
    for language, lines in wrong.items():
        for line in lines:
            Path("wrong.md").write_text(f"```{language}\n{line}\n```\n")
            with pytest.raises((AssertionError, NameError, UserError)):
                run_page(Path("wrong.md"))
    Path("wrong.md").write_text("<!-- run by: tests/test_docs.py::test_nothing -->\n```bash\nfalse\n```\n")
    with pytest.raises(AssertionError, match="no test_nothing"):
        run_page(Path("wrong.md"))


def test_nobody_takes_dp_fedcl_for_differential_privacy() -> None:
    """Wherever it is listed, something nearby says what DP stands for."""
    assert "Not differential privacy" in (METHODS["dpfedcl"].__doc__ or "")
    for page in PAGES:
        # Pages of results name it among its relatives, and the other two speak of its clustering.
        if "results" in page.parts or page.name in ("design.md", "gpu.md"):
            continue
        for line in page.read_text(encoding="utf-8").splitlines():
            listed = "DP-FedCL" in line and not line.startswith("# ")
            said = "density" in line or "differential privacy" in line
            assert not listed or said, f"{page.name}: {line}"
