"""What a person sees of a sweep: bars on a terminal, plain lines elsewhere, with the time left for the whole."""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from protofed.runs.numbers import duration
from protofed.runs.progress import LINE_SECONDS, describe_round, say_on
from protofed.sweep.plan import Cell
from protofed.sweep.watch import SweepWatch
from protofed.sweep.workers import CellOutcome

SHOWN = 8  # cells at work that have a bar of their own
BAR = 24  # letters of a bar
NUMBERS = 40  # letters for what stands behind it


def shortened(text: str, room: int) -> str:
    """The text without its middle if it is too long: both ends tell cells apart."""
    return text if len(text) <= room else f"{text[: room // 2 - 1]}…{text[-(room - room // 2) :]}"


class Estimate:
    """How long the rest takes: the rounds that are left, at the pace of cells of the same kind, spread over the
    jobs."""

    def __init__(self, cells: Sequence[Cell], kept: Sequence[CellOutcome], jobs: int) -> None:
        self.jobs = max(1, jobs)
        self.left = {cell.hash: cell.experiment.rounds for cell in cells}
        self.kinds = {cell.hash: apart_from_seed(cell) for cell in cells}
        self.seen: dict[tuple[str, ...], list[float]] = {}  # kind -> rounds and seconds
        for outcome in kept:
            if outcome.summary and outcome.summary.get("seconds"):
                self._add(
                    apart_from_seed(outcome.cell), outcome.cell.experiment.rounds, float(outcome.summary["seconds"])
                )

    def _add(self, kind: tuple[str, ...], rounds: int, seconds: float) -> None:
        total = self.seen.setdefault(kind, [0, 0.0])
        total[0] += rounds
        total[1] += seconds

    def learn(self, cell: Cell, seconds: float) -> None:
        """Add the seconds per round of a cell, from elsewhere."""
        self._add(apart_from_seed(cell), 1, seconds)

    def begun(self, cell: Cell, done: int) -> None:
        self.left[cell.hash] = cell.experiment.rounds - done

    def round(self, cell: Cell, line: dict[str, Any]) -> None:
        self.left[cell.hash] = cell.experiment.rounds - line["round"]
        self._add(apart_from_seed(cell), 1, line["seconds"])

    def ended(self, cell: Cell) -> None:
        self.left.pop(cell.hash, None)

    def seconds(self) -> float | None:
        """None while nothing is known."""
        rounds = sum(total[0] for total in self.seen.values())
        if not rounds:
            return None
        usual = sum(total[1] for total in self.seen.values()) / rounds
        each = {kind: total[1] / total[0] for kind, total in self.seen.items() if total[0]}
        ahead = [rounds * each.get(self.kinds[name], usual) for name, rounds in self.left.items()]
        return max([sum(ahead) / self.jobs, *ahead])  # the longest cell cannot be split

    def text(self) -> str:
        seconds = self.seconds()
        return "" if seconds is None else f"{duration(seconds)} left"


def apart_from_seed(cell: Cell) -> tuple[str, ...]:
    """All labels of a cell except its seed: cells that share them take equally long."""
    return tuple(value for key, value in cell.labels.items() if key != "seed")


def ended_text(outcome: CellOutcome) -> str:
    """How a cell ended, in one line."""
    if outcome.status == "done" and outcome.summary:
        s = outcome.summary
        accuracy = "" if s["accuracy_mean"] is None else f"accuracy {100 * s['accuracy_mean']:.2f} %, "
        return f"{outcome.cell.name}: {accuracy}{duration(s['seconds'])}"
    why = outcome.reason.splitlines()[0]
    return ": ".join(dict.fromkeys([outcome.cell.name, outcome.status, why]))  # said once: "stopped: stopped"


class _View(SweepWatch):
    """What both ways of showing progress share."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.estimate = Estimate([], [], 1)
        self.total = self.done = self.failed = 0

    def start(self, cells: Sequence[Cell], kept: Sequence[CellOutcome], jobs: int) -> None:
        self.total, self.done = len(cells), 0
        self.estimate = Estimate(cells, kept, jobs)
        before = f", {len(kept)} finished before" if kept else ""
        at_once = f", {jobs} at a time" if jobs > 1 else ""
        self.say(f"{len(cells)} cells to run{before}{at_once}" if cells else f"all {len(kept)} cells are finished")

    def begun(self, cell: Cell, done: int) -> None:
        self.estimate.begun(cell, done)

    def round(self, cell: Cell, line: dict[str, Any]) -> None:
        self.estimate.round(cell, line)

    def ended(self, outcome: CellOutcome) -> None:
        if outcome.status != "stopped":
            self.estimate.ended(outcome.cell)
            self.done += 1
        self.failed += outcome.status == "failed"

    def note(self, text: str) -> None:
        self.say(f"note: {text}")

    def say(self, text: str) -> None:
        say_on(self.console, text)


class CellBars(_View):
    """One bar for the whole sweep, and one for each running cell."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=BAR),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
        )
        self.progress = Progress(*columns, console=console, transient=True)
        self.whole = self.progress.add_task("checking", total=None, numbers="")
        self.tasks: dict[str, Any] = {}
        self.began = time.monotonic()

    def checking(self, done: int, of: int) -> None:
        self.progress.update(self.whole, completed=done, total=of)
        if time.monotonic() - self.began > 1:
            self.progress.start()

    def start(self, cells: Sequence[Cell], kept: Sequence[CellOutcome], jobs: int) -> None:
        super().start(cells, kept, jobs)
        self.progress.update(self.whole, description="sweep", completed=0, total=len(cells))
        self.progress.start()

    def begun(self, cell: Cell, done: int) -> None:
        super().begun(cell, done)
        name = f"  {shortened(cell.name, max(20, self.console.width - BAR - NUMBERS))}"
        self.tasks[cell.hash] = self.progress.add_task(
            name, total=cell.experiment.rounds, completed=done, numbers="", visible=len(self.tasks) < SHOWN
        )

    def round(self, cell: Cell, line: dict[str, Any]) -> None:
        super().round(cell, line)
        self.progress.update(self.tasks[cell.hash], completed=line["round"], numbers=describe_round(line))
        self._show()

    def ended(self, outcome: CellOutcome) -> None:
        super().ended(outcome)
        if outcome.cell.hash in self.tasks:
            self.progress.remove_task(self.tasks.pop(outcome.cell.hash))
        self.say(ended_text(outcome))
        self._show()

    def _show(self) -> None:
        failed = f"{self.failed} failed" if self.failed else ""
        numbers = ", ".join(filter(None, [self.estimate.text(), failed]))
        self.progress.update(self.whole, completed=self.done, numbers=numbers)

    def end(self) -> None:
        self.progress.stop()


class CellLines(_View):
    """A line for each cell that ends, and one every few seconds in between."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.said = time.monotonic()
        self.rounds: dict[str, str] = {}

    def checking(self, done: int, of: int) -> None:
        if time.monotonic() - self.said >= LINE_SECONDS:
            self.say(f"checking cells, {done}/{of}")

    def round(self, cell: Cell, line: dict[str, Any]) -> None:
        super().round(cell, line)
        self.rounds[cell.hash] = f"{cell.name}: round {line['round']}/{cell.experiment.rounds}"
        if time.monotonic() - self.said >= LINE_SECONDS:
            parts = [f"({self.done}/{self.total}) {'; '.join(self.rounds.values())}", self.estimate.text()]
            self.say("; ".join(filter(None, parts)))

    def ended(self, outcome: CellOutcome) -> None:
        super().ended(outcome)
        self.rounds.pop(outcome.cell.hash, None)
        left = self.estimate.text() if self.done < self.total else ""
        self.say("; ".join(filter(None, [f"({self.done}/{self.total}) {ended_text(outcome)}", left])))

    def say(self, text: str) -> None:
        self.said = time.monotonic()
        super().say(text)


def view(console: Console) -> SweepWatch:
    return CellBars(console) if console.is_terminal else CellLines(console)
