"""What pages need not repeat by hand: `<!-- name -->` becomes text made from the code and the measured numbers."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import keys

from protofed import METHODS, Experiment
from protofed.explain.explain import explain
from protofed.method import Method
from protofed.papers.reproduce import pages
from protofed.papers.reproduce import published as results
from protofed.papers.reproduce.entry import entry_names, load_entry
from protofed.papers.reproduce.result import EntryResult, cells, orderings

MARK = re.compile(r"^<!-- ([a-z]+) -->$", re.MULTILINE)
ARXIV = re.compile(r"arXiv (\d{4}\.\d{5})")
LIGHT = {
    "creff": ["method.steps=1", "method.head_epochs=1"],
    "fedtgp": ["method.server_epochs=1"],
}  # on the server; no message depends on them
PAGES = Path(__file__).parents[1] / "methods"
BESIDE = ("local", "fedavg")  # what every method is measured against
UNMEASURED = "Our studies do not have this method yet."
STUDIES = {
    "studies/label-skew": [
        "own test",
        "own test, by head",
        "own test, by prototype",
        "global test, global model (GM)",
        "PM(V)",
    ],
    "studies/feature-skew": [
        "own test",
        "own test, by head",
        "own test, by prototype",
        "all test samples, global model",
    ],
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with its marks filled in; a mark that nobody knows is a mistake."""
    folder, name = Path(page.file.src_uri).parent.name, Path(page.file.src_uri).stem
    makers: dict[str, Callable[[], str]] = {"keys": keys.tables, "methods": _methods}
    if folder == "methods" and name in METHODS:
        makers |= {
            part.__name__.strip("_"): lambda part=part: part(name) for part in (_about, _choices, _sent, _measured)
        }

    def fill(found: re.Match[str]) -> str:
        if found[1] not in makers:
            raise ValueError(f"{page.file.src_uri}: nothing is made for <!-- {found[1]} -->")
        return makers[found[1]]()

    return MARK.sub(fill, markdown)


def table(titles: Iterable[str], rows: Iterable[Iterable[str]], align: str = "---") -> str:
    titles = list(titles)
    lines = [f"| {' | '.join(titles)} |", "|---|" + f"{align}|" * (len(titles) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _methods() -> str:
    """One row a method: what the server sees of an upload, and how much goes up in the demo."""
    rows = []
    for name in METHODS:
        told = _explained(name)
        seen = sorted({group["seen"] for group in told["up"]["groups"]}, reverse=True)
        one = "any" if not told["note"] else "one"
        sent = f"{told['up']['bytes']['mean']:,.0f}" if told["up"]["groups"] else "0"
        title = (PAGES / f"{name}.md").read_text(encoding="utf-8").split("\n")[0].removeprefix("# ")
        rows.append([f"[{title}]({name}.md)", keys.line(told["about"]), one, ", ".join(seen) or "nothing", sent])
    return table(["method", "in a line", "models", "server sees uploads", "bytes up, a client and round"], rows)


_TOLD: dict[str, Any] = {}


def _explained(name: str) -> Any:
    """What `protofed explain` counts in the demo."""
    if name not in _TOLD:
        _TOLD[name] = explain(Experiment.load("demo", f"method={name}", *LIGHT.get(name, [])))
    return _TOLD[name]


def _about(name: str) -> str:
    kind: type[Method] = METHODS[name]
    paper = ARXIV.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", kind.paper)
    return (
        f'*{keys.line(_explained(name)["about"])}*\n\n{paper}. In experiments: `method = "{name}"`. '
        f"Code: `src/protofed/methods/{name}.py`."
    )


def _choices(name: str) -> str:
    """Every field, its default and the two readings."""
    told = _explained(name)
    rows = [
        [
            f"`{c['key']}`",
            *(f"`{keys.shown(c[part])}`" for part in ("default", "paper", "official")),
            keys.line(c["about"]),
        ]
        for c in told["choices"]
    ]
    parts = [table(["key", "default", "paper", "official", "what it means"], rows)]
    if told["not_followed"]:
        parts.append("In every reading, this differs from the paper:")
        parts.append("\n".join(f"- {keys.line(line)}" for line in told["not_followed"]))
    return "\n\n".join(parts)


def _sent(name: str) -> str:
    """Up and down in the demo, what stays and what the server learns."""
    told = _explained(name)
    parts = [f"In the demo (twenty clients), as `protofed explain {name}` counts it:"]
    if told["note"]:
        parts[0] = (
            f"In the demo (twenty clients, all with {told['note'].split()[2]}), as `protofed explain {name}` counts it:"
        )
    if not told["up"]["groups"]:
        parts.append("Nothing goes up and nothing comes down.")
    else:
        rows = [[way, *_row(group)] for way in ("up", "down") for group in told[way]["groups"]]
        rows += [[way, "all, with counts and header", "", _range(told[way]["bytes"]), ""] for way in ("up", "down")]
        parts.append(table(["", "a client and round", "numbers", "bytes", "who sees it"], rows))
    parts.append(
        "**The server learns** " + "; ".join(keys.line(text) for text in told["private"]["server_learns"]) + "."
    )
    stays = [", ".join(f"`{part}`" for part in entry["parts"]) for entry in told["private"]["params"]]
    kept = f"the parameters {', '.join(stays)}, and " if stays else ""
    parts.append(f"**Stays private:** {kept}{told['private']['data']}.")
    return "\n\n".join(parts)


def _row(group: Mapping[str, Any]) -> list[str]:
    parts = ", ".join(f"`{part}`" for part in group["parts"][:4])
    what = f"{group['name']}: {parts}" if parts else f"{group['name']} {tuple(group['shape'] or ())}"
    return [what, _range(group["numbers"]), _range(group["bytes"]), group["seen"]]


def _range(spread: Mapping[str, Any]) -> str:
    low, high = spread["min"], spread["max"]
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _measured(name: str) -> str:
    """The two studies of all methods, and every other entry that has the method."""
    kept = results.kept()
    parts = []
    for study, columns in STUDIES.items():
        entry, measured = load_entry(study), kept[study]
        if name not in entry.rows:
            continue
        chosen = [column for column in entry.columns if column.name in columns]
        rows = [
            [
                f"**{row}**" if row == name else row,
                *(cells(entry, measured, row, column)[1] or "-" for column in chosen),
            ]
            for row in dict.fromkeys([*BESIDE, name])
        ]
        parts.append(f"{entry.title} ([whole table](../{pages.link(study)})), in %, three seeds:")
        parts.append(table(["", *(column.title for column in chosen)], rows, "---:"))
    if claims := list(_claims(name, kept)):
        titles = ["claims put to the test, columns of a table in which", "hold", "undecided", "do not hold"]
        parts.append(table(titles, claims, "---:"))
    return "\n\n".join(parts) or UNMEASURED


def _claims(name: str, kept: Mapping[str, EntryResult]) -> Iterable[list[str]]:
    for entry in (load_entry(one) for one in entry_names() if one in kept):
        for ordering in orderings(entry, kept[entry.name]):
            if re.match(rf"{name}\b", ordering.text):
                where = f"[{entry.name}](../{pages.link(entry.name)})"
                counts = (ordering.count(verdict) for verdict in ("holds", "undecided", "does not hold"))
                yield [f"{where}: {keys.line(ordering.text)}", *(str(count) if count else "" for count in counts)]
