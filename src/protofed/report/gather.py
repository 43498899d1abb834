"""Run folders, found and sorted: finished ones for a table, all of them for a report. Folders that are not runs are
named."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from protofed.config.defaults import unwritten
from protofed.errors import UserError, asked_in_python, option
from protofed.report.parts import Remark
from protofed.report.runs import Run, alike, one_data, read_finished, read_run
from protofed.runs import listing
from protofed.runs.folder import RunFolder
from protofed.version import VERSION

ASIDE = ("device", "engine.", "record.", "evaluate.own", "evaluate.gm")  # keys that make no other experiment of it
NEEDED = ("method", "seed", "rounds", "partition", "accuracy_mean")  # keys without which a summary is not one
HALF = "half written: it has no experiment.toml"
TRACES = ("summary.json", "rounds.jsonl", "checkpoints")  # of a run without its experiment.toml
NO_FOLDER, HOLDS_NONE = "there is no such folder", "holds no run"
Found = tuple[Path, dict[str, str] | None]
"""A folder that should be a run, with its labels if a sweep gave it some."""


class Collected(NamedTuple):
    """The runs of a table, and the folders that are left out."""

    runs: list[Run]
    left_out: list[Remark]


class Gathered(NamedTuple):
    """The runs of a report, the folders that are left out, and unreadable parts of runs."""

    runs: list[Run]
    left_out: list[Remark]
    remarks: list[Remark]


def gather(paths: Iterable[str | Path], *, everything: bool = False) -> Gathered:
    """All runs in or below these folders, finished or not; `everything` as in `collect`."""
    found = Gathered([], [], [])
    folders: dict[Path, Found] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            found.left_out.append(Remark(path, "is a file, not a folder" if path.exists() else NO_FOLDER))
            continue
        before = len(found.left_out)
        here = [one for one in _candidates(path, everything, found.left_out, True) if one[0].is_dir()]
        if not here and len(found.left_out) == before:
            found.left_out.append(Remark(path, HOLDS_NONE))
        for place, labels in here:
            folders.setdefault(place.resolve(), (place, labels))
    made = {
        folder: RunFolder(folder).environment() for folder, _ in folders.values()
    }  # `read_run` names what is damaged
    versions = {folder: str(about["protofed"]) for folder, about in made.items() if "protofed" in about}
    kept = _that_counts(versions.values())
    for folder, labels in folders.values():
        if versions.get(folder, kept) != kept:
            found.left_out.append(Remark(folder, f"made by protofed {versions[folder]}, not {kept}"))
            continue
        remarks: list[Remark] = []
        try:
            run = read_run(folder, remarks, (labels or {}).get("method", ""))
        except UserError as error:
            found.left_out.append(Remark(folder, str(error)))
            continue
        if _add(run, found):
            found.remarks.extend(remarks)
    return found


def _add(run: Run, found: Gathered) -> bool:
    """Whether a run is in the report: of two runs with the same settings and seed, only the one that is further."""
    twin = next((other for other in found.runs if other.settings == run.settings and one_data(other, run)), None)
    if twin is not None and _far(run) <= _far(twin):
        found.left_out.append(Remark(run.folder, f"has the settings and the seed of {twin.folder}, which is in"))
        return False
    if twin is not None:  # a run that was killed, and started again
        found.runs.remove(twin)
        found.left_out.append(Remark(twin.folder, f"has the settings and the seed of {run.folder}, which is in"))
    if any(other.views and alike(other, run) for other in found.runs):
        run = replace(run, views={})  # one seed's are drawn; of many runs they would fill the memory
    failed = listing.reason(run.folder)
    if run.summary is None and failed.is_file():
        found.remarks.append(Remark(run.folder, f"{_unfinished(RunFolder(run.folder))}. It is drawn as far as it goes"))
    found.runs.append(run)
    return True


def _far(run: Run) -> tuple[bool, int]:
    """A finished run is further than one that is not, and among those, the one with more rounds."""
    return run.summary is not None, len(run.rounds)


def _that_counts(versions: Iterable[str]) -> str:
    """Do not mix numbers of different versions: take the runs of this version or, if there are none, those of the most
    frequent one."""
    many = Counter(versions)
    return VERSION if VERSION in many or not many else many.most_common(1)[0][0]


def collect(
    source: str | Path | Iterable[str | Path], *, everything: bool = False, any_version: bool = False
) -> Collected:
    """The finished runs in one or several folders: the cells of a sweep, or all runs of any other folder. `everything`
    also takes runs in a sweep's folder that are not its cells, `any_version` those of other versions.

    `everything` takes runs that lie in a sweep's folder without being of it, `any_version` those of other versions.
    """
    left_out: list[Remark] = []
    named: list[Found] = []
    for folder in source if isinstance(source, Iterable) and not isinstance(source, str) else [source]:
        if not isinstance(folder, str | Path):
            raise UserError(f"runs is {type(folder).__name__}. Give the path of a folder, or a list of such paths.")
        if not Path(folder).is_dir():
            raise UserError(f"there is no folder {str(folder)!r}. Name the folder of a sweep, of a run, or of several.")
        named += _candidates(Path(folder), everything, left_out)
    return finished_runs(named, left_out, any_version)


def finished_runs(
    named: Iterable[tuple[Path, Mapping[str, str] | None]], left_out: Sequence[Remark] = (), any_version: bool = False
) -> Collected:
    """The finished runs in these folders, with the labels of their sweeps."""
    found = [_read(path, labels) for path, labels in named]
    runs = [run for run in found if isinstance(run, Run)]
    left_out = [*left_out, *(out for out in found if isinstance(out, Remark))]
    if not any_version:
        runs = _one_version(runs, left_out)
    return Collected(_labelled(runs), left_out)


def _candidates(folder: Path, everything: bool, left_out: list[Remark], tolerant: bool = False) -> Iterator[Found]:
    """Folders that should be runs: a sweep's cells, or all of any other folder; `tolerant` of a damaged listing."""
    if any((folder / name).exists() for name in ("experiment.toml", *TRACES)):
        yield folder, None
        return
    inner = [path for path in sorted(folder.iterdir()) if path.is_dir() and path.name[0] not in "._"]
    listed = _listed(folder, left_out, tolerant)
    if listed is None:
        for path in inner:
            yield from _candidates(path, everything, left_out, tolerant)
        return
    yield from ((folder / name, labels) for name, labels in listed)
    known = {name for name, _ in listed}
    for path in (path for path in inner if RunFolder(path).exists and path.name not in known):
        if everything:
            yield path, None
        else:
            taken = option("everything" if asked_in_python() else "all", True)
            left_out.append(Remark(path, f"not a cell of sweep.toml ({taken} takes it)"))


def _listed(folder: Path, left_out: list[Remark], tolerant: bool) -> list[tuple[str, dict[str, str]]] | None:
    """The cells of a sweep; None if the folder does not belong to one."""
    if not (folder / listing.LISTING).is_file():
        return None
    try:
        return listing.read_cells(folder)
    except UserError as error:
        if not tolerant:
            raise
        left_out.append(Remark(folder / listing.LISTING, str(error)))
        return None


def _read(path: Path, labels: Mapping[str, str] | None) -> Run | Remark:
    folder = RunFolder(path)
    try:
        if why_not := _unfinished(folder):
            return Remark(path, why_not)
        summary = folder.summary()
        if lacking := [key for key in NEEDED if key not in summary]:
            return Remark(path, f"of another version: its summary.json has no {', '.join(lacking)}")
        if type(summary["seed"]) is not int:
            return Remark(path, f"its summary.json is damaged: seed is {summary['seed']!r}")
        run = read_finished(path, labels)
    except (UserError, OSError, UnicodeDecodeError) as error:
        return Remark(path, str(error))
    if run.settings.get("method.name", run.settings.get("method")) != summary["method"]:
        return Remark(path, "its experiment.toml and summary.json are of different methods")
    if not all(type(line.get("round")) is int for line in run.rounds):
        return Remark(path, "its rounds.jsonl is damaged: a line is not a round")
    last = run.rounds[-1]["round"] if run.rounds else 0
    if last != summary["rounds"]:
        return Remark(path, f"its rounds.jsonl ends at round {last} of {summary['rounds']}")
    return run


def _unfinished(folder: RunFolder) -> str:
    """Why a folder has no finished run; empty if it has one."""
    failed = listing.reason(folder.path)
    why = next(iter(failed.read_text(encoding="utf-8").splitlines()), "") if failed.is_file() else ""
    if not folder.exists and any((folder.path / name).exists() for name in TRACES):
        return HALF
    if not folder.exists:
        return f"failed: {why}" if why else "not run yet"
    if folder.finished:
        return ""
    done = f"{len(folder.rounds())} of {folder.experiment_dict().get('rounds', '?')} rounds"
    return f"failed after {done}: {why}" if why else f"unfinished: {done}"


def _one_version(runs: Sequence[Run], left_out: list[Remark]) -> list[Run]:
    """The runs of the version that counts."""
    kept = _that_counts(run.version for run in runs)
    for run in runs:
        if run.version != kept:
            taken = option("any-version", True)
            left_out.append(Remark(run.folder, f"made by protofed {run.version}, not {kept} ({taken} takes it)"))
    return [run for run in runs if run.version == kept]


def unlike(run: Run, other: Run) -> list[str]:
    """The keys, known to both, that differ between two runs that should differ only in their seed."""
    ours, theirs = _keys(run), _keys(other)
    same = [key for key in ours if key in theirs and not key.startswith(ASIDE)]
    return [f"{key} {theirs[key]!r} -> {ours[key]!r}" for key in same if ours[key] != theirs[key]]


def _labelled(runs: Sequence[Run]) -> list[Run]:
    """Give labels to runs that belong to no sweep: the method, and every key in which runs differ."""
    if all("experiment" in run.labels for run in runs):
        return list(runs)
    values: dict[tuple[str, str], set[str]] = {}
    for run in runs:
        for key, value in _keys(run).items():
            values.setdefault(_scope(run, key), set()).add(str(value))

    def labelled(run: Run) -> Run:
        if "experiment" in run.labels:
            return run
        differ = {key: str(value) for key, value in _keys(run).items() if len(values[_scope(run, key)]) > 1}
        return replace(run, labels={"experiment": "", "method": run.name, "seed": str(run.seed), **differ})

    return [labelled(run) for run in runs]


def _scope(run: Run, key: str) -> tuple[str, str]:
    """Compare keys of [method] within one method, and all other keys among all runs."""
    return (run.name if key.startswith("method.") else "", key)


def _keys(run: Run) -> dict[str, Any]:
    """Every key except those by which runs are told apart anyway."""
    return {key: value for key, value in (unwritten() | run.settings).items() if key not in ("seed", "method.name")}
