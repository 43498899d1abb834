"""What a person sees during a run: a bar on a terminal, plain lines elsewhere."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from protofed.config.experiment import Experiment
from protofed.runs.numbers import amount
from protofed.runs.watch import Watch

LINE_SECONDS = 5.0  # between two plain lines


def say_on(console: Console, text: str) -> None:
    """The text without the console's own markup, colours or line breaks."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def describe_round(line: dict[str, Any]) -> str:
    """Loss, accuracy and bytes of a round, short."""
    parts = [f"loss {line['loss']:.3f}"] if line["loss"] is not None else []
    if line.get("accuracy_mean") is not None:
        parts.append(f"accuracy {100 * line['accuracy_mean']:.2f} %")
    if line.get("global_accuracy") is not None:
        parts.append(f"global {100 * line['global_accuracy']:.2f} %")
    return ", ".join([*parts, f"up {amount(line['bytes_up'])}B"])


class Bar(Watch):
    """A progress bar with round, ETA, loss, accuracy and bytes."""

    def __init__(self, console: Console, label: str) -> None:
        self.console = console
        self.label = label
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
        )
        self.progress = Progress(*columns, console=console, transient=True)

    def start(self, experiment: Experiment, done: int) -> None:
        self.progress.start()
        self.task = self.progress.add_task(self.label, total=experiment.rounds, completed=done, numbers="")

    def round(self, line: dict[str, Any]) -> None:
        self.progress.update(self.task, completed=line["round"], numbers=describe_round(line))

    def measured(self, done: int, clients: int) -> None:
        description = f"{self.label}, measuring every client"
        self.progress.update(self.task, description=description, completed=done, total=clients)

    def note(self, text: str) -> None:
        self.console.print(f"note: {text}", highlight=False, markup=False)

    def end(self) -> None:
        self.progress.stop()


class RoundLines(Watch):
    """A line every few seconds, and one each for the first and the last round."""

    def __init__(self, console: Console, label: str) -> None:
        self.console, self.label = console, label

    def start(self, experiment: Experiment, done: int) -> None:
        self.rounds, self.first = experiment.rounds, done
        self.began = self.said = time.monotonic()

    def round(self, line: dict[str, Any]) -> None:
        now, number = time.monotonic(), line["round"]
        if number not in (self.first + 1, self.rounds) and now - self.said < LINE_SECONDS:
            return
        self.said = now
        left = (now - self.began) / (number - self.first) * (self.rounds - number)
        say_on(self.console, f"{self.label}: round {number}/{self.rounds}, {describe_round(line)}, {left:.0f} s left")

    def measured(self, done: int, clients: int) -> None:
        if time.monotonic() - self.said >= LINE_SECONDS:
            self.said = time.monotonic()
            say_on(self.console, f"{self.label}: measuring every client, {done}/{clients}")

    def note(self, text: str) -> None:
        say_on(self.console, f"note: {text}")


def watch_rounds(console: Console, label: str) -> Watch:
    return Bar(console, label) if console.is_terminal else RoundLines(console, label)
