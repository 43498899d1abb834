"""What commands print: tables for a person, and the entries of `protofed list`."""

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from protofed.config import schema
from protofed.config.files import configs, shipped_experiments
from protofed.config.registry import all_methods
from protofed.data import PARTITIONS
from protofed.data.sources import available, check_folder
from protofed.errors import UserError
from protofed.models import MODELS
from protofed.report.rules import rule_of
from protofed.runs.measure import Result
from protofed.runs.numbers import amount
from protofed.runs.progress import say_on

SHOWN = ("method", "clients", "rounds", "seed", "accuracy_mean", "accuracy_std", "accuracy_worst10",
         "accuracy_head_mean", "accuracy_proto_mean", "global_accuracy", "pm_v", "pm_l", "params_up_per_round",
         "bytes_up", "bytes_down", "seconds")  # fmt: skip
NAMED = 4  # prefixes of one part that are named one by one


def result(console: Console, done: Result) -> None:
    """The numbers of a finished run."""
    s = done.summary
    if lacking := [key for key in SHOWN if key not in s]:
        raise UserError(
            f"{done.folder / 'summary.json'} is damaged: it has no {lacking[0]}. Remove it, and continue with --resume."
        )
    table = Table(
        title=f"{s['method']}, {_many(s['clients'], 'client')}, {_many(s['rounds'], 'round')}, seed {s['seed']}",
        title_justify="left",
    )
    table.add_column("what")
    table.add_column("value", justify="right")
    shown = {
        f"accuracy, mean over clients ({rule_of(s)})": s["accuracy_mean"],
        "  std over clients": s["accuracy_std"],
        "  worst tenth of clients": s["accuracy_worst10"],
        "  by classifier": s["accuracy_head_mean"],
        "  by nearest prototype": s["accuracy_proto_mean"],
        "AUC, mean over clients": s.get("auc_mean"),
        "  worst tenth of clients, AUC": s.get("auc_worst10"),
        "balanced accuracy, mean over clients": s.get("balanced_mean"),
        "global model, global test set": s["global_accuracy"],
        "personal models, global test set, their classes: PM(V)": s["pm_v"],
        "  the same, weighted by their shares of classes: PM(L)": s["pm_l"],
        "backdoor: samples with the trigger taken for the target": s.get("attack_success"),
        "classes so far, mean over the ends of tasks": s.get("accuracy_incremental"),
        "  the same, global model": s.get("global_accuracy_incremental"),
        "forgetting: earlier tasks' classes, best less last": s.get("forgetting"),
        "  the same, global model, global test set": s.get("global_forgetting"),
        "held-out clients that joined, by classifier": s.get("held_out_head_mean"),
        "  joined, before they trained": s.get("held_out_start_mean"),
        "  joined, by nearest prototype": s.get("held_out_proto_mean"),
        "  had they trained alone": s.get("held_out_alone_mean"),
    }
    for what, value in shown.items():
        if value is not None:
            table.add_row(what, f"{100 * value:.2f} %")
    table.add_row("parameters sent up a round", amount(s["params_up_per_round"]))
    table.add_row("bytes up / down, whole run", f"{amount(s['bytes_up'])} / {amount(s['bytes_down'])}")
    table.add_row("seconds", f"{s['seconds']:.1f}")
    console.print(table)
    pictures = ", ".join(sorted(p.name for p in done.folder.glob("*.png")))
    say_on(console, f"run: {done.folder}\npictures: {pictures}")


def _many(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


# protofed list


def entries(what: str, data_dir: Path | None) -> list[dict[str, Any]]:
    """One entry for each method, model, data set, partition or experiment."""
    if what == "data":
        check_folder(data_dir)
        return [{**row, "about": f"{row['kind']}, {row['path']}".rstrip(", ")} for row in available(data_dir)]
    if what == "experiments":
        return [{"name": name, "about": _about_file(configs() / f"{name}.toml")} for name in shipped_experiments()]
    registries: dict[str, Mapping[str, Any]] = {"methods": all_methods(), "models": MODELS, "partitions": PARTITIONS}
    beside = ("paper", "losses", "presets") if what == "methods" else ()
    return [
        {"name": name, "about": _about(kind), "keys": _keys(kind), **{key: getattr(kind, key) for key in beside}}
        for name, kind in registries[what].items()
    ]


def _about(kind: Any) -> str:
    """The first line of what a class says of itself."""
    text = inspect.getdoc(getattr(kind, "func", kind)) or ""
    return text.split("\n")[0]


def _about_file(path: Path) -> str:
    """The comment on the first line of an experiment."""
    first = path.read_text(encoding="utf-8").split("\n", 1)[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def _keys(kind: Any) -> list[dict[str, Any]]:
    docs = schema.docs(kind)
    return [
        {"key": key, "default": default, "about": docs.get(key, "")}
        for key, (_, default) in schema.fields(kind).items()
    ]


# protofed explain


@contextlib.contextmanager
def bar(console: Console, label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with the time left on a terminal, for what takes more than two seconds."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task, began = progress.add_task(label), time.monotonic()

    def tell(done: int, of: int) -> None:
        progress.update(task, completed=done, total=of)
        if time.monotonic() - began > 2:
            progress.start()

    try:
        yield tell
    finally:
        progress.stop()


def explanation(console: Console, told: Mapping[str, Any], experiment: str) -> None:
    """What `explain` found, in the order in which people ask."""
    say_on(console, f"{told['method']}: {told['about']}\n{told['paper']}")
    if told["losses"]:
        say_on(console, "\nLosses")
    for line in told["losses"]:
        say_on(console, f"  {line}")
    for line in told["not_followed"]:
        say_on(console, f"  differs from the paper: {line}")
    if told["note"]:
        say_on(console, f"\nnote: {told['note']}")
    say_on(console, "\nTraining on a client")
    if not told["phases"]:
        say_on(console, "  none: the method trains no parameter")
    for number, phase in enumerate(told["phases"], 1):
        say_on(console, f"  {number}. {_phase(phase)}")
    up, down = told["up"], told["down"]
    _message(console, f"What goes up, per client and round (round {up['round']} of {experiment})", up, "server sees it")
    _message(console, f"What goes down, per client and round (round {down['round']})", down, "who gets it")
    if any(phase["when"] != "every round" for phase in told["phases"]):
        say_on(console, "  It is sent to every client once more after the last round.")
    say_on(console, f"  {told['counted']}")
    say_on(console, "\nWhat stays private")
    for line in _private(told):
        say_on(console, f"  {line}")
    say_on(console, "What the server learns")
    for line in told["private"]["server_learns"]:
        say_on(console, f"  {line}")
    if told["private"]["in_a_federation"]:
        say_on(console, f"In a federation\n  {told['private']['in_a_federation']}")
    say_on(console, "\nChoices in force (* differs from the default)")
    _choices(console, told["choices"])
    presets = "; ".join(f"{name}: {words}" for name, words in told["presets"].items())
    say_on(console, f"Presets (method.preset=NAME): {presets or 'none'}.")


def _phase(phase: Mapping[str, Any]) -> str:
    epochs = f"{phase['epochs']} {'epoch' if phase['epochs'] == 1 else 'epochs'}"
    then = "in the first round" if phase["when"] == "every round" else "by then"
    source = f"the experiment's {then}" if phase["lr_from"] == "experiment" else "the method's own"
    extra = ", without momentum and weight decay" if phase["plain"] else ""
    extra += f", on {phase['loss']}" if phase["loss"] else ""
    what = f"{', '.join(phase['trains'])} ({_by_architecture(phase['numbers'])} parameters)"
    return f"{phase['when']}: {what} for {epochs} at lr {phase['lr']:g} ({source}){extra}"


def _message(console: Console, title: str, message: Mapping[str, Any], seen: str) -> None:
    say_on(console, f"\n{title}")
    if not message["groups"]:
        say_on(console, "  nothing")
        return
    table = _plain("what", "shape and type", "numbers", "bytes", seen)
    for group in message["groups"]:
        table.add_row(_group(group), _shape(group), _range(group["numbers"]), _range(group["bytes"]), group["seen"])
    table.add_row("counts, row numbers, header", "", "", _range(message["bytes_beside"]), "")
    console.print(table)
    for unit in ("numbers", "bytes"):
        spread = message[unit]
        mean = f", mean {spread['mean']:,.1f}" if spread["min"] < spread["max"] else ""
        words = "bytes as serialised" if unit == "bytes" else "numbers of models and prototypes, as the papers count"
        whole = f"all {message['clients']} clients of the round {spread['round']:,}"
        say_on(console, f"  {words}: per client {_range(spread)}{mean}; {whole}")


def _group(group: Mapping[str, Any]) -> str:
    if not group["parts"]:
        return str(group["name"])
    return f"{group['name']}: {_parts(group['parts'])}{' buffers' if group['kind'] == 'buffers' else ''}"


def _parts(parts: Sequence[str]) -> str:
    return ", ".join(parts) if len(parts) <= NAMED else f"{len(parts)} parts of {parts[0].split('.')[0]}.*"


def _shape(group: Mapping[str, Any]) -> str:
    shape = f"{group['tensors']} tensors" if group["shape"] is None else f"({', '.join(map(str, group['shape']))})"
    size = group["dtype_bytes"]
    kind = f"{group['dtype']}, {size} {'byte' if size == 1 else 'bytes'} each"
    rows = f", {_range(group['rows'])} of {group['rows']['of']} rows sent" if group["rows"] else ""
    return f"{shape}{rows}; {kind}"


def _private(told: Mapping[str, Any]) -> Iterator[str]:
    private = told["private"]
    for entry in private["params"]:
        known = "; the server knows their initial values, because it sent them" if entry["from_server"] else ""
        numbers = f"{_by_architecture(entry['numbers'])} parameters"
        trained = "never trained" if entry["trained"] == "never" else f"trained {entry['trained']}"
        yield f"{_parts(entry['parts'])}: {numbers}, {trained}, never sent{known}"
    if not private["params"]:
        yield "no parameters: the upload has all of them"
    for kind in ("buffers", "memory"):
        for entry in private[kind]:
            yield f"{_parts(entry['parts'])} ({kind}): {_by_architecture(entry['numbers'])} numbers"
    if any(phase["when"] != "every round" for phase in told["phases"]):
        yield "everything learnt after the last round"
    yield private["data"]


def _choices(console: Console, choices: Sequence[Mapping[str, Any]]) -> None:
    table = _plain("key", "in force", "default", "paper", "official", "what it means")
    for choice in choices:
        mark = "" if choice["value"] == choice["default"] else " *"
        values = (_value(choice[key]) for key in ("default", "paper", "official"))
        cells = (choice["key"], _value(choice["value"]) + mark, *values, " ".join(choice["about"].split()))
        table.add_row(*map(Text, cells))
    console.print(table)


def _plain(*titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _range(spread: Mapping[str, Any]) -> str:
    low, high = spread["min"], spread["max"]
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _by_architecture(numbers: Mapping[str, int]) -> str:
    if len(set(numbers.values())) == 1:
        return f"{next(iter(numbers.values())):,}"
    return ", ".join(f"{name} {count:,}" for name, count in numbers.items())


def bench_table(console: Console, found: Mapping[str, Any]) -> None:
    """All engines side by side, with the parts of a round."""
    ways = [way for way in ("reference", "uncompiled", "compiled") if f"{way}_s" in found]
    table = Table(title=f"{found['workload']}: {found['about']}", title_justify="left")
    table.add_column("seconds a round")
    for way in ways:
        table.add_column(way if way == "reference" else f"stacked, {way}", justify="right")
    table.add_row("whole", *(f"{found[f'{way}_s']:.4f}" for way in ways))
    for part in found["stacked_parts"]:
        numbers = [found[f"{way}_parts"].get(part) for way in ways]
        table.add_row(f"  {part}", *("-" if n is None else f"{n:.4f}" for n in numbers))
    table.add_row("first round", *(f"{found[f'{way}_first_s']:.2f}" for way in ways))
    console.print(table)
    say_on(
        console,
        f"ratio {found['ratio']:.1f} ({found['best']}); {found['not_training']:.0%} is not training; "
        f"{found['times_floor']:.1f} times the floor of {found['floor_s']:.4f} s; peak {found['peak_mb']:.0f} MB; "
        f"{found['device']}, {found['precision']}, torch {found['torch']}",
    )
    if found["note"]:
        say_on(console, f"note: {found['note']}")
