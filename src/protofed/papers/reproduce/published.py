"""The published numbers in docs/results.json, and what a folder of results adds to them and to the pages."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protofed.atomic import write_atomically
from protofed.errors import UserError
from protofed.papers.reproduce.entry import PaperEntry, entry_names, load_entry
from protofed.papers.reproduce.measure import Views
from protofed.papers.reproduce.pages import IMAGES, OVERVIEW, pages
from protofed.papers.reproduce.result import EntryResult, again, as_dict, same_runs, there, with_earlier

NUMBERS = Path("docs/results.json")


def kept() -> dict[str, EntryResult]:
    """The numbers that come with protofed, or from the checkout that it runs in."""
    here = Path(__file__).parent
    places = (here / "results.json", here.parents[3] / NUMBERS)
    path = next((place for place in places if place.is_file()), None)
    return _read(path) if path else {}


def _read(path: Path) -> dict[str, EntryResult]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {name: EntryResult(entry=name, **numbers) for name, numbers in found.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}). Take it from the repository again.") from None


def check_page() -> None:
    """Raise if there is no page to write."""
    if not OVERVIEW.is_file() or not NUMBERS.is_file():
        raise UserError(
            f"--write and --check are for a checkout: there is no {NUMBERS} here. Change to the repository's root."
        )


def write_page(out: Path) -> list[str]:
    """Bring the results in a folder into the page; returns what was done, in words. Quick versions stay out.

    Runs of an entry may be made on several machines, and brought in one folder after the other: what the page has of
    the same runs stays, where there is nothing new.
    """
    check_page()
    numbers, said = _read(NUMBERS), []
    for name in entry_names():
        folder = out / name
        if not (folder / "result.json").is_file():
            continue
        measured = EntryResult.load(folder / "result.json")
        if not measured.rows:
            continue
        before, parts = numbers.get(name), [f"{len(measured.seeds)} seed{'s' * (len(measured.seeds) > 1)}"]
        if before and not same_runs(before, measured):
            now, then = (len(there(list(some.runs.values()))) for some in (measured, before))
            if now < then:
                said.append(
                    f"{name}: left as it is: its {then} runs are of other settings or data than the {now} in {out}. "
                    f"Remove it from {NUMBERS} to start again"
                )
                continue
            parts.append(f"instead of {then} runs of other settings or data")
            before = None
        numbers[name] = with_earlier(before, measured) if before else measured
        kept = measured.missing - numbers[name].missing
        parts += [f"runs missing: {numbers[name].missing}"] * (numbers[name].missing > 0)
        parts += [f"runs that stay from before: {kept}"] * (kept > 0)
        if (
            kept
            and list(IMAGES.glob(f"{name.replace('/', '-')}-*.png"))
            and not _drawn(load_entry(name), numbers[name])
        ):
            parts.append(f"and so do its pictures, because {out} lacks runs that they show")
        elif not kept:
            _keep(name, folder)
        said.append(f"{name}: {', '.join(parts)}")
    _write(numbers)
    return [
        *(said or [f"nothing is brought in: {out} has no results but quick ones, if any"]),
        f"{OVERVIEW} has {len(numbers)} of {len(entry_names())} entries",
    ]


def note_difference(out: Path) -> list[str]:
    """Note on the page how far the results in a folder are from the page's own, which stay; returns the notes."""
    check_page()
    numbers, said = _read(NUMBERS), []
    for name in entry_names():
        if name in numbers and (out / name / "result.json").is_file():
            now = EntryResult.load(out / name / "result.json")
            if text := again(load_entry(name), numbers[name], now):
                numbers[name] = numbers[name]._replace(again=text)
                said.append(f"{name}: {text}")
    _write(numbers)
    return said or [f"nothing is noted: {out} has no numbers that {OVERVIEW} has too"]


def _write(numbers: Mapping[str, EntryResult]) -> None:
    content = {name: as_dict(numbers[name]) for name in entry_names() if name in numbers}
    write_atomically(NUMBERS, (json.dumps(content, indent=1) + "\n").encode())
    for path, text in pages(numbers).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())


def _drawn(entry: PaperEntry, measured: EntryResult) -> bool:
    """Draw a figure again, if the numbers are enough for it."""
    from protofed.papers.reproduce import figures  # with Matplotlib, which takes its time

    if entry.figure is None or entry.figure.kind not in figures.OF_NUMBERS:
        return False
    with tempfile.TemporaryDirectory() as folder:
        figures.draw_entry(entry, measured, [], Views(entry, None, Path(folder)), Path(folder))
        _keep(entry.name, Path(folder))
    return True


def _keep(name: str, folder: Path) -> None:
    """Copy an entry's pictures to the page's."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for picture in sorted(folder.glob("*.png")):
        shutil.copyfile(picture, IMAGES / f"{name.replace('/', '-')}-{picture.name}")
