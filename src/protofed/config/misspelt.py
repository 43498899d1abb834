"""Misspelt keys and names of an experiment, found before PyTorch is loaded: a typo should not wait for it."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from protofed.config.files import SECTIONS, name_in, override, read_tables
from protofed.config.registry import FLOWER, LIGHT, check_model, check_partition, method_path
from protofed.config.schema import unknown_key
from protofed.config.sections import Scalars
from protofed.errors import UserError
from protofed.importing import MEMORY, is_path

HERE = Path(__file__).parents[1]


def refuse_misspelt(source: str | Path, *overrides: str) -> None:
    """Refuse an experiment with a misspelt name or key. `Experiment.load` checks whatever passes, and the rest."""
    tables = read_tables(source)
    if "methods" in tables:
        raise UserError(f"{source} is a sweep, not an experiment. Write: protofed sweep {source}.")
    raw = override(tables, overrides)
    top = [*(field.name for field in fields(Scalars)), *SECTIONS]
    for key, value in raw.items():
        if key not in top and not _in_a_section(key):
            raise unknown_key("", key, value, top)
    method = name_in(raw.get("method", "fedproto"))
    if method is not None:
        method_path(method)
    _check_partition(name_in(raw.get("partition", "nway_kshot")))
    _check_models(name_in(raw.get("model", "cnn_digits")))
    for section, kind in LIGHT.items():
        known, given = [field.name for field in fields(kind)], raw.get(section)
        for key, value in given.items() if isinstance(given, dict) else ():
            if key not in known:
                raise unknown_key(section, key, value, known)


def _in_a_section(key: str) -> bool:
    """Whether any section may have this key: then the hint needs the section's class, and so PyTorch."""
    files = [HERE / "ops" / "optim.py", *(HERE / "methods").glob("*.py"), *(HERE / "data").glob("*.py")]
    field = re.compile(rf"^    {re.escape(key)}:", re.MULTILINE)
    light = any(key == field.name for kind in LIGHT.values() for field in fields(kind))
    return light or any(field.search(file.read_text(encoding="utf-8")) for file in files)


def _check_partition(name: Any) -> None:
    if isinstance(name, str) and not name.startswith(FLOWER):
        check_partition(name)


def _check_models(names: Any) -> None:
    for name in names if isinstance(names, list) else [names]:
        if isinstance(name, str) and not is_path(name) and not name.startswith(MEMORY):
            check_model(name)
