"""How long a sweep will take: from the rounds that its cells have done, or from a short trial of cells without any."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protofed.errors import UserError
from protofed.runs.folder import RunFolder
from protofed.runs.loop import Interrupted, run
from protofed.runs.numbers import duration
from protofed.runs.probes import NO_PROBES, Probes
from protofed.runs.watch import Watch
from protofed.sweep.plan import Cell
from protofed.sweep.progress import Estimate, apart_from_seed
from protofed.sweep.run import share_out
from protofed.sweep.watch import SweepWatch
from protofed.sweep.workers import Placed

ROUNDS = 3  # of a trial; the first, in which steps are compiled, does not count


class _Few(Watch):
    """Stops a run after a few rounds, and keeps their seconds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def round(self, line: dict[str, Any]) -> None:
        self.seconds.append(line["seconds"])
        if len(self.seconds) == ROUNDS:
            raise KeyboardInterrupt


def forecast(
    placed: Sequence[Placed],
    data_dir: Path | None,
    jobs: int | None = None,
    *,
    trial: bool = False,
    watch: SweepWatch | None = None,
    probes: Probes = NO_PROBES,
) -> str:
    """The time that the rest of these cells will take, and where that number comes from."""
    cells = {p.folder: p for p in placed}.values()
    left = [p for p in cells if not RunFolder(p.folder).finished]
    if not left:
        return "nothing is left to run"
    shares = share_out([p.cell for p in placed], jobs)
    estimate = Estimate([p.cell for p in left], [], min(len(shares), len(left)))
    known, measured = 0, set()
    for cell, path in cells:
        if lines := RunFolder(path).rounds():
            known += 1
            measured.add(apart_from_seed(cell))
            estimate.learn(cell, _pace([line["seconds"] for line in lines]))
            if not RunFolder(path).finished:
                estimate.begun(cell, len(lines))
    new = list(
        {apart_from_seed(p.cell): p.cell for p in reversed(left) if apart_from_seed(p.cell) not in measured}.values()
    )[::-1]
    if trial:
        for cell in new:
            (watch or SweepWatch()).note(f"timing {ROUNDS} rounds of {cell.name}")
            estimate.learn(cell, _pace(_try(cell, data_dir, shares[0].cores, probes)))
    seconds = estimate.seconds()
    if seconds is None:
        return "no cell has been run yet, so there is no estimate of the time. --trial makes one from a few rounds"
    sources = [f"{known} cell{'s' * (known != 1)} with rounds done"] if known else []
    sources += (
        [f"trials of {ROUNDS} rounds of {len(new)} kind{'s' * (len(new) != 1)} of cells"] if trial and new else []
    )
    many = "1 kind of cells was not run yet and is" if len(new) == 1 else f"{len(new)} kinds were not run yet and are"
    unknown = f"; {many} taken to be as fast as the others" if new and not trial else ""
    at_once = f", {estimate.jobs} at a time" if estimate.jobs > 1 else ""
    return f"about {duration(seconds)} for {len(left)} cells{at_once}; estimated from {' and '.join(sources)}{unknown}"


def _pace(seconds: Sequence[float]) -> float:
    """Seconds per round, without the first one if there are others, because it compiles."""
    later = sorted(seconds[1:] or seconds)
    return sum(later) / len(later)


def _try(cell: Cell, data_dir: Path | None, cores: int, probes: Probes) -> list[float]:
    """The seconds of a cell's first rounds, run in a folder that is then removed."""
    watch = _Few()
    with tempfile.TemporaryDirectory(prefix="protofed-trial-") as folder:
        try:
            run(cell.experiment, Path(folder) / "run", data_dir=data_dir, watch=watch, cores=cores, probes=probes)
        except Interrupted:
            if len(watch.seconds) < ROUNDS:
                raise UserError("the trial was stopped. Without --trial, --dry-run trains nothing.") from None
    return watch.seconds
