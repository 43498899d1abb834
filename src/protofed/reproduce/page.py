"""docs/results.md: every entry with what was measured, from docs/results.json and the entries themselves."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protofed.atomic import write_atomically
from protofed.errors import UserError
from protofed.reproduce import plan, render
from protofed.reproduce.entry import PAPERS, Entry, load, names
from protofed.reproduce.measure import Views
from protofed.reproduce.result import Measured, again, alike, as_dict, joined, orderings, there

NUMBERS, PAGE, IMAGES = Path("docs/results.json"), Path("docs/results.md"), Path("docs/images/reproduce")
START = 3.0  # seconds that a run takes beside its rounds, roughly


def kept() -> dict[str, Measured]:
    """The numbers that come with protofed, or lie in the checkout that it is run from."""
    here = Path(__file__).parent
    places = (here / "results.json", here.parents[2] / NUMBERS)
    path = next((place for place in places if place.is_file()), None)
    return _read(path) if path else {}


def _read(path: Path) -> dict[str, Measured]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {name: Measured(entry=name, **numbers) for name, numbers in found.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}). Take it from the repository again.") from None


def check() -> None:
    """Raise where there is no page to write."""
    if not PAGE.is_file() or not NUMBERS.is_file():
        raise UserError(
            f"--write and --check are for a checkout: there is no {NUMBERS} here. Change to the repository's root."
        )


def write(out: Path) -> list[str]:
    """Bring the results in a folder into the page; returns what was done, in words. Quick versions stay out.

    Runs of an entry may be made on several machines, and brought in one folder after the other: what the page has of
    the same runs stays, where there is nothing new.
    """
    check()
    numbers, said = _read(NUMBERS), []
    for name in names():
        folder = out / name
        if not (folder / "result.json").is_file():
            continue
        measured = Measured.load(folder / "result.json")
        if not measured.rows:
            continue
        before, parts = numbers.get(name), [f"{len(measured.seeds)} seed{'s' * (len(measured.seeds) > 1)}"]
        if before and not alike(before, measured):
            now, then = (len(there(list(some.runs.values()))) for some in (measured, before))
            if now < then:
                said.append(
                    f"{name}: left as it is: its {then} runs are of other settings or data than the {now} in {out}. "
                    f"Remove it from {NUMBERS} to begin anew"
                )
                continue
            parts.append(f"instead of {then} runs of other settings or data")
            before = None
        numbers[name] = joined(before, measured) if before else measured
        kept = measured.missing - numbers[name].missing
        parts += [f"runs missing: {numbers[name].missing}"] * (numbers[name].missing > 0)
        parts += [f"runs that stay from before: {kept}"] * (kept > 0)
        if kept and list(IMAGES.glob(f"{name.replace('/', '-')}-*.png")) and not _drawn(load(name), numbers[name]):
            parts.append(f"and so do its pictures, because {out} lacks runs that they show")
        elif not kept:
            _keep(name, folder)
        said.append(f"{name}: {', '.join(parts)}")
    _write(numbers)
    return [
        *(said or [f"nothing is brought in: {out} has no results but quick ones, if any"]),
        f"{PAGE} has {len(numbers)} of {len(names())} entries",
    ]


def note(out: Path) -> list[str]:
    """Note on the page how far the results in a folder are from its own, which stay; returns what was noted."""
    check()
    numbers, said = _read(NUMBERS), []
    for name in names():
        if name in numbers and (out / name / "result.json").is_file():
            now = Measured.load(out / name / "result.json")
            if text := again(load(name), numbers[name], now):
                numbers[name] = numbers[name]._replace(again=text)
                said.append(f"{name}: {text}")
    _write(numbers)
    return said or [f"nothing is noted: {out} has no numbers that {PAGE} has too"]


def _write(numbers: Mapping[str, Measured]) -> None:
    content = {name: as_dict(numbers[name]) for name in names() if name in numbers}
    write_atomically(NUMBERS, (json.dumps(content, indent=1) + "\n").encode())
    write_atomically(PAGE, whole(numbers).encode())


def _drawn(entry: Entry, measured: Measured) -> bool:
    """Draw a figure anew, where the numbers are enough for it."""
    from protofed.reproduce import figures  # with Matplotlib, which takes its time

    if entry.figure is None or entry.figure.kind not in figures.OF_NUMBERS:
        return False
    with tempfile.TemporaryDirectory() as folder:
        figures.draw(entry, measured, [], Views(entry, None, Path(folder)), Path(folder))
        _keep(entry.name, Path(folder))
    return True


def _keep(name: str, folder: Path) -> None:
    """Copy an entry's pictures to the page's."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for picture in sorted(folder.glob("*.png")):
        shutil.copyfile(picture, IMAGES / f"{name.replace('/', '-')}-{picture.name}")


def whole(numbers: Mapping[str, Measured]) -> str:
    """The page."""
    parts = [
        "# Results",
        "Every table and figure of the papers, and studies of our own: what was reported, what was measured here and "
        "the difference. Written by `protofed reproduce --write` from `src/protofed/reproduce/entries`, which has the "
        "settings and the remarks, and `docs/results.json`, which has the numbers by seed.",
        "Percent where nothing else is said (cosines and silhouettes are times 100), mean ± standard deviation of the "
        "seeds. A claim is that one number is above another or, where the paper's numbers have it so, below; it holds, "
        "or does not, if all seeds agree, by however little, and otherwise it is undecided. Where there is one seed, "
        "that is said. Times of runs are added up; of several that shared a machine each took longer than it does "
        "alone. Another machine rounds otherwise, and after many rounds the same seed gives another accuracy there: "
        "where some runs were made once more, the entry says how far apart their numbers are (`protofed reproduce "
        "--check`).",
        _overview(numbers),
    ]
    paper = ""
    for name in names():
        entry = load(name)
        if entry.paper != paper:
            paper = entry.paper
            parts.append(f"# {PAPERS[paper]}")
        parts += _section(entry, numbers.get(name))
    return "\n\n".join(parts) + "\n"


def _overview(numbers: Mapping[str, Measured]) -> str:
    lines = ["| entry | shows | claims that hold / undecided / do not | |", "|---|---|---|---|"]
    for name in names():
        entry, measured = load(name), numbers.get(name)
        judged = [one for ordering in orderings(entry, measured) for one in ordering.judged] if measured else []
        verdicts = [one.verdict for one in judged]
        counts = " / ".join(str(verdicts.count(verdict)) for verdict in ("holds", "undecided", "does not hold"))
        alone = sum(one.seeds == 1 for one in judged)
        counts += "" if not alone else " in one seed" if alone == len(judged) else f", {alone} of them in one seed"
        cells = [f"[{name}](#{anchor(name)})", entry.shows or entry.title, counts if judged else "-"]
        lines.append(f"| {' | '.join([*cells, takes(entry, measured)])} |")
    return "\n".join(lines)


def anchor(name: str) -> str:
    """How GitHub calls the heading of an entry."""
    return name.replace("/", "")


def _section(entry: Entry, measured: Measured | None) -> list[str]:
    parts = [f"## {entry.name}", f"**{entry.shows + ': ' if entry.shows else ''}{entry.title}.**", entry.about.strip()]
    if entry.replaced:
        parts.append(entry.replaced.strip())
    if entry.sweep:
        parts.append(render.settings(entry))
    parts.append(f"`protofed reproduce {entry.name}`; {takes(entry, measured)}.")
    if measured is None:
        return [*parts, "*Not measured yet.*"]
    if measured.label:
        parts.append(f"**{measured.label}**")
    parts.append(render.markdown(entry, measured).strip())
    stem = entry.name.replace("/", "-")
    parts += [f"![{entry.title}](images/reproduce/{path.name})" for path in sorted(IMAGES.glob(f"{stem}-*.png"))]
    parts += [line[0].upper() + line[1:] for line in render.notes(entry, measured)]
    parts += [f"Made once more: {measured.again}."] * bool(measured.again)
    if entry.remarks:
        parts.append(entry.remarks.strip())
    return parts


def takes(entry: Entry, measured: Measured | None) -> str:
    """How long an entry takes, measured or estimated, and with how many seeds it was measured."""
    if measured and measured.seconds and not measured.missing:
        time = f"{render.duration(measured.seconds)} of runs on {measured.machine}"
        seeds = f"{len(measured.seeds)} seed{'s' * (len(measured.seeds) > 1)}"
        return f"measured, {seeds}: {time}" + (f" ({measured.label})" if measured.label else "")
    runs, rounds = plan.size(entry)
    seconds = START * runs + rounds * entry.round_seconds
    alone = f"about {render.duration(seconds)}, one after another, on an H200 (estimated)"
    guess = f"{runs} runs, {alone}" if runs else "a minute or two on a CPU"
    if measured and measured.rows:
        where = f" on {measured.machine}" if measured.machine else ""
        if not measured.missing:
            return f"measured{where}; all of it {guess}"
        spent = f" ({render.duration(measured.seconds)} of runs)" if measured.seconds else ""
        done = f"{len(measured.runs) - measured.missing} of {len(measured.runs)} runs measured{where}{spent}"
        return f"{done}, {measured.missing} to go; all of it {alone}"
    return f"not measured; {guess}"
