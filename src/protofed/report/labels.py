"""Labels of rows and lines: a name with the parameters that distinguish it, as short as possible."""

import collections
from collections.abc import Mapping, Sequence

from protofed.report.figure import told_apart

LONGEST = 60  # letters of a label
VALUE = 16  # letters of a value in a label that is longer


def label_of(name: str, parameters: Mapping[str, str]) -> str:
    """A name with its parameters, without the sections of keys if that is clear."""
    short = {key: key.partition(".")[2] or key for key in parameters}
    short |= {key: key.removesuffix(".name") for key in parameters if key.endswith(".name")}
    twice = {one for one, many in collections.Counter(short.values()).items() if many > 1}
    said = [f"{key if short[key] in twice else short[key]}={value}" for key, value in parameters.items()]
    return ", ".join(filter(None, [name, *said]))


def short_labels(rows: Sequence[tuple[str, Mapping[str, str]]], longest: int = LONGEST) -> list[str]:
    """One label for each name with its parameters. If one is too long, all show only what distinguishes rows of the
    same name, and the part of long values that distinguishes them."""
    whole = [label_of(name, parameters) for name, parameters in rows]
    if max(map(len, whole), default=0) <= longest:
        return whole
    kept = [{key: row[1][key] for key in _needed(row, rows)} for row in rows]
    brief = [label_of(name, parameters) for (name, _), parameters in zip(rows, kept, strict=True)]
    if max(map(len, brief)) > longest:
        values = sorted({value for parameters in kept for value in parameters.values()})
        short = dict(zip(values, told_apart(values, VALUE), strict=True))
        cut = [{key: short[value] for key, value in parameters.items()} for parameters in kept]
        brief = [label_of(name, parameters) for (name, _), parameters in zip(rows, cut, strict=True)]
    return brief if len(set(brief)) == len(set(whole)) else whole


def _needed(row: tuple[str, Mapping[str, str]], rows: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """The keys that are needed to tell rows of one name apart, the first ones if there is a choice."""
    name, parameters = row
    others = [each for other, each in rows if other == name]
    keys = list(dict.fromkeys(key for each in others for key in each))
    different = len({tuple(each.get(key) for key in keys) for each in others})
    for key in reversed(keys):
        rest = [one for one in keys if one != key]
        if len({tuple(each.get(one) for one in rest) for each in others}) == different:
            keys = rest
    return [key for key in parameters if key in keys]
