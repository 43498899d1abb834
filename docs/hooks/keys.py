"""Every key of an experiment as tables, from the classes that read them."""

import inspect
from collections.abc import Mapping
from typing import Any

from protofed import MODELS
from protofed.config import schema
from protofed.config.experiment import PLAIN, Scalars
from protofed.data import PARTITIONS

SECTIONS: dict[str, Any] = {"": Scalars, **PLAIN}


def tables() -> str:
    """A table a section, then one a partition, then the models."""
    parts = []
    for section, kind in SECTIONS.items():
        parts += [f"## [{section}]" if section else "## Outside of any section", _fields(section, kind)]
    parts.append("## [partition]")
    for name, kind in PARTITIONS.items():
        parts += [f"### {name}", about(kind), _fields("partition", kind)]
    parts.append("## [model]")
    rows = [f"| `{name}` | {about(kind)} | {_short(kind)} |" for name, kind in MODELS.items()]
    parts.append("\n".join(["| name | what | keys |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


def about(kind: Any) -> str:
    """The first line of what a class says of itself."""
    return line((inspect.getdoc(getattr(kind, "func", kind)) or "").split("\n")[0])


def _fields(section: str, kind: Any) -> str:
    docs: Mapping[str, str] = schema.docs(kind)
    rows = [
        f"| `{schema.key_path(section, key)}` | `{shown(default)}` | {line(docs.get(key, ''))} |"
        for key, (_, default) in schema.fields(kind).items()
    ]
    return "\n".join(["| key | default | what it means |", "|---|---|---|", *rows])


def _short(kind: Any) -> str:
    return ", ".join(f"`{key} = {shown(default)}`" for key, (_, default) in schema.fields(kind).items()) or "-"


def shown(value: Any) -> str:
    """A value as TOML has it, without quotes."""
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else '""'


def line(text: str) -> str:
    """Text that may stand in a cell of a table, or in a list: nothing in it is markup but code."""
    parts = " ".join(text.split()).split("`")
    for i in range(0, len(parts), 2):
        parts[i] = parts[i].replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;").replace("[", "\\[")
    return "`".join(parts).replace("|", "&#124;")
