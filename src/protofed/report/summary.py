"""What is above the figures: which method did how well, what differs, and what everything was made with."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protofed.report.columns import ABOUT, ACCURACY, METRICS, Column, chosen_columns
from protofed.report.groups import MISSING, Group, differing
from protofed.report.rules import OWN, in_order
from protofed.report.runs import Run
from protofed.runs.numbers import amount, duration, over_seeds

COSTS = {
    "params_up_per_round": "params up / round",
    "bytes_up": "sent up",
    "bytes_down": "sent down",
    "seconds": "time",
}
SHOWN = ("accuracy", *(name for name, metric in METRICS.items() if metric.unit == "%" and name != "accuracy"))
MEANING = {
    "accuracy": "each client's own model on its own test set, mean over clients, in %",
    "std": "population deviation over clients, in points; less is fairer",
    "worst10": "mean accuracy of the worst tenth of the clients",
    "global-own": "the global model on each client's own test set, mean over clients",
    **ABOUT,
    "params up / round": "numbers sent up in a round by all clients",
    "sent up": "in the whole run, as serialised",
    "sent down": "in the whole run, with what comes after the last round, as serialised",
    "time": "of the whole run, with what comes after the last round",
}


def summary_columns(groups: Sequence[Group], names: Sequence[str] = SHOWN) -> list[Column]:
    """The columns that a group has a number for: one for each rule by which groups are judged."""
    return chosen_columns(None, [run for group in groups for run in group.counted], names)


def summary_table(groups: Sequence[Group], comparable: bool) -> dict[str, Any]:
    """Columns, and the cells of every method: text, and whether it is the best or second best of its column."""
    shown = summary_columns(groups)
    rows: list[dict[str, Any]] = [{"label": group.label, "about": _about(group), "cells": []} for group in groups]
    for column in shown:
        values = [over_seeds(_numbers(group, column)) for group in groups]
        places = _places(groups, values, column) if comparable else {}
        for i, (row, value) in enumerate(zip(rows, values, strict=True)):
            text = _percent(value, groups[i].counted) + OWN * (value is not None and column.marked(groups[i].runs[0]))
            row["cells"].append({"text": text, "place": places.get(i, 0)})
    for row, group in zip(rows, groups, strict=True):
        row["cells"] += [{"text": _cost(group, key), "place": 0} for key in COSTS]
    meant = {METRICS[name].key: text for name, text in MEANING.items() if name in METRICS}
    heads = [{"title": column.title, "about": _meaning(column, meant)} for column in shown]
    heads += [{"title": title, "about": MEANING.get(title, "")} for title in COSTS.values()]
    return {"columns": heads, "rows": rows}


def _meaning(column: Column, meant: dict[str, str]) -> str:
    judged = f"judged by {column.rule}" if column.rule is not None else "judged as the method says"
    return ", ".join(filter(None, [meant.get(column.metric.key, ""), judged if column.metric.judged else ""]))


def _numbers(group: Group, column: Column) -> list[float]:
    return [value for run in group.counted if (value := column.of(run)) is not None]


def _percent(value: tuple[float, float] | None, runs: Sequence[Run]) -> str:
    if value is None:
        return MISSING
    return f"{100 * value[0]:.2f}" + (f" ± {100 * value[1]:.2f}" if len(runs) > 1 else "")


def _places(groups: Sequence[Group], values: Sequence[tuple[float, float] | None], column: Column) -> dict[int, int]:
    """1 for the best finished methods, 2 for the next; a single method is never best."""
    known = {i: round(v[0], 4) for i, v in enumerate(values) if v is not None and groups[i].finished}
    ranked = sorted(set(known.values()), reverse=column.metric.better == "high")
    marked = len(ranked) - 1  # of two, the second best is the worst
    return {i: ranked.index(v) + 1 for i, v in known.items() if ranked.index(v) < min(2, marked)}


def _about(group: Group) -> str:
    """Seeds, the method's rule, and whether all runs are finished."""
    seeds = f"{'seeds' if len(group.seeds) > 1 else 'seed'} {', '.join(map(str, group.seeds))}"
    judged = f"; judged by {group.rule}"
    left = len(group.runs) - len(group.finished)
    state = ""
    if left == len(group.runs):
        lasts = ", ".join(str(run.rounds[-1]["round"]) for run in group.runs)
        state = f"; not finished, as it stood after round {lasts} of {group.runs[0].settings['rounds']}"
    elif left:
        state = f"; {left} of {len(group.runs)} seeds not finished and not counted"
    return seeds + judged + state


def _cost(group: Group, key: str) -> str:
    totals = [_total(run, key) for run in group.counted]
    mean = over_seeds(totals)
    if mean is None:
        return MISSING
    return duration(mean[0], 1) if key == "seconds" else amount(mean[0]) + ("B" if key.startswith("bytes") else "")


def _total(run: Run, key: str) -> float | None:
    if run.summary is not None:
        return run.summary.get(key)
    values = run.column("params_up" if key.startswith("params") else key)[1]
    return sum(values) / (len(run.rounds) if key.startswith("params") else 1) if values else None


def headline(groups: Sequence[Group], comparable: bool) -> str:
    """The outcome in one sentence per rule, if there is something to compare."""
    if not comparable:
        return ""
    rules = in_order({group.rule for group in groups if group.finished})
    said = list(filter(None, (_best_first(groups, Column(ACCURACY, rule=rule)) for rule in rules)))
    if said and len(rules) > 1:
        said.append("Methods judge by different rules: each one's own is marked, and named below the method.")
    return " ".join(said)


def _best_first(groups: Sequence[Group], column: Column) -> str:
    """Which method did how well by one rule; empty if fewer than two have a number."""
    known = [(group, value) for group in groups if group.finished and (value := over_seeds(_numbers(group, column)))]
    if len(known) < 2:
        return ""
    ranked = sorted(known, key=lambda pair: -pair[1][0])
    more = f" and {len(ranked) - 4} more" if len(ranked) > 4 else ""
    spread = max(ranked[0][1][1], ranked[1][1][1])
    close = ranked[0][1][0] - ranked[1][1][0] <= spread and len(ranked[0][0].counted) > 1
    doubt = " The first two are closer than the deviation over seeds." if close else ""
    comma, colon = ("; ", ":") if any("," in group.label for group, _ in ranked[:4]) else (", ", "")
    words = [f"{group.label}{colon} {_percent(value, group.counted)} %" for group, value in ranked[:4]]
    return f"Mean accuracy over clients by {column.rule}, best first: {comma.join(words)}{more}.{doubt}"


def facts(groups: Sequence[Group]) -> list[str]:
    """The sizes, for the line below the title."""
    runs = [run for group in groups for run in group.runs]
    seeds = sorted({run.seed for run in runs})
    told = [
        f"{len(runs)} run{'s' * (len(runs) > 1)}",
        f"{len(groups)} method{'s' * (len(groups) > 1)}",
        f"{len(seeds)} seed{'s' * (len(seeds) > 1)}",
    ]
    for key, word in (("data.name", ""), ("partition.name", ""), ("clients", " clients"), ("rounds", " rounds")):
        values = {_text(run.settings.get(key)) for run in runs}
        told += [f"{values.pop()}{word}"] if len(values) == 1 else []
    return told


def settings(groups: Sequence[Group]) -> dict[str, Any]:
    """What differs between methods, the settings of each method, and those that all share."""
    every = [{k: v for k, v in group.runs[0].settings.items() if k != "seed"} for group in groups]
    differ = differing(every)
    own: set[str] = set()  # in which runs of one method differ
    for name in {some["method.name"] for some in every}:
        own |= set(differing([some for some in every if some["method.name"] == name]))
    shown = [key for key in differ if not key.startswith("method.") or key in own]
    return {
        "differ": [[key, *[_text(some.get(key)) for some in every]] for key in shown],
        "methods": [
            [group.label, ", ".join(f"{k[7:]} = {_text(v)}" for k, v in some.items() if k.startswith("method."))]
            for group, some in zip(groups, every, strict=True)
        ],
        "shared": [
            [key, _text(value)]
            for key, value in every[0].items()
            if key not in differ and not key.startswith("method.")
        ],
    }


def _text(value: Any) -> str:
    if value is None:
        return MISSING
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    if isinstance(value, dict):  # a model of several
        fields = ", ".join(f"{key}={_text(one)}" for key, one in value.items() if key != "name")
        return f"{value.get('name', '')}({fields})"
    return str(value)


def environments(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Runs by what they were made with: the machine and versions, the commands, the folders."""
    found: dict[str, dict[str, Any]] = {}
    for run in (run for group in groups for run in group.runs):
        made = {key: str(value) for key, value in run.environment.items() if key != "command" and value not in ({}, [])}
        entry = found.setdefault(json.dumps(made), {"made": list(made.items()), "commands": [], "folders": []})
        command = command_line(run.environment.get("command"))
        if command not in entry["commands"]:
            entry["commands"].append(command)
        entry["folders"].append(str(run.folder))
    return list(found.values())


def command_line(words: Any) -> str:
    """The command as it was typed, without the path of the program."""
    if not isinstance(words, list) or not words:
        return "not recorded"
    program = Path(str(words[0])).name
    return shlex.join(["protofed" if program in ("__main__.py", "-m", "-c") else program, *map(str, words[1:])])
