"""Where data comes from: two built-in sets, files and folders, Hugging Face datasets, torchvision."""

import gzip
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Le, Lt, MinLen

from protofed.data.checked import as_domain, same_classes
from protofed.data.domain import Domain
from protofed.data.files import Found, Pair, kind_of, read, read_ids, read_scale
from protofed.data.hub import from_hub, from_torchvision
from protofed.data.own import read_clients
from protofed.errors import UserError, nearest
from protofed.importing import MEMORY, imported, is_path, told

BUILT_IN = ("digits", "spiral")
# digits and spiral are data sets: another seed of the experiment must not make other data of them.
FIXED = 0


@dataclass(frozen=True)
class Data:
    """Where the samples come from (the [data] section of an experiment)."""

    name: str | list[str] = "digits"
    """One source, or several domains at once: digits, spiral, a .npz file, a folder of IDX files or of images (as a
    path, or by name in the data folder), hf:NAME for a Hugging Face data set, torchvision:NAME, or the import path of
    a function of your own (mypackage.data:load)."""
    options: dict[str, Any] = field(default_factory=dict)
    """What a function of your own is called with."""
    ids: str = ""
    """A side table (.npz) of natural owners, row for row with the data: arrays NAME_train and NAME_test."""
    test_fraction: Annotated[float, Gt(0), Lt(1)] = 0.2
    """Share held back as test data, class by class, where a source has no test part of its own."""
    size: Annotated[int, Ge(0), Le(4096)] = 0
    """Resize images to size x size; 0 keeps them."""
    channels: Literal[0, 1, 3] = 0
    """Turn images into grey (1) or colour (3); 0 keeps them."""
    normalize: Literal["auto", "half", "none"] = "auto"
    """How pixels are scaled before they reach a model: auto by the training data, half to -1..1, none not at all."""
    augment: list[Literal["crop", "flip"]] = field(default_factory=list)
    """Random changes to training images: crop (padded and shifted), flip (left to right)."""
    noise: Annotated[float, Ge(0)] = 0.1
    """spiral: standard deviation of the angle, in radians. FedNH prints N(0, 1), which is noise = 1.0, but the
    arms start only pi/3 = 1.05 apart: at 1.0 no classifier can pass 39 % accuracy, at 0.1 the best possible is 94 %."""
    counts: Annotated[list[Annotated[int, Ge(1), Le(10_000_000)]], MinLen(1)] = field(
        default_factory=lambda: [3000] * 6
    )
    """spiral: training samples of each class. FedNH's imbalanced set is [3000, 1500, 750, 375, 187, 93]."""


def load(data: Data, data_dir: Path | None) -> list[Domain]:
    """One Domain per name in `data.name`, all with the same classes."""
    names = [data.name] if isinstance(data.name, str) else list(data.name)
    if not names or not all(name.rpartition(":")[2].strip() for name in names):
        raise UserError(
            f"data.name is empty (got {data.name!r}). Name a source: {', '.join(BUILT_IN)}, a file, hf:NAME."
        )
    if len(set(names)) < len(names):
        raise UserError(f"data.name lists a source twice: {', '.join(names)}. Each domain is named once.")
    if data.ids and len(names) > 1:
        raise UserError(
            f"data.ids goes row for row with one data set, but data.name lists {len(names)}. "
            "Put the arrays NAME_train and NAME_test into each .npz instead."
        )
    if data_dir is not None and not data_dir.is_dir():
        raise UserError(f"--data-dir {data_dir} is not a folder. Name the folder that holds the data sets.")
    domains: list[Domain] = []
    for name in names:
        domains += _own(name, data) if is_path(name) else [_load(name, data, data_root(data_dir))]
    return same_classes(domains)


def _own(name: str, data: Data) -> list[Domain]:
    """What a function of the user's own gives: one data set, or a list or dict of them, one domain each."""
    if data.ids or data.size or data.channels:
        raise UserError(f"data.ids, data.size and data.channels are not for {name}, which gives data as it is to be.")
    function = imported("data.name", name)
    if not callable(function):
        raise UserError(f"data.name = {name!r} is {type(function).__name__}, not a function that gives data.")
    try:
        given = function(**data.options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"data.name = {name!r}: calling it raises {told(error)}. Its arguments: data.options."
        ) from error
    several = isinstance(given, list) or (isinstance(given, dict) and "train" not in given)
    return read_clients(given if several else {name: given}, test_fraction=data.test_fraction, seed=FIXED).domains


def load_own(source: str, data: Data, classes: Sequence[str], data_dir: Path | None = None) -> Domain:
    """One client's own data, its labels as numbers of these classes: by name where it has names, else as they are."""
    domain = _load(source, replace(data, ids=""), data_root(data_dir), names=tuple(classes))
    unknown = [name for name in domain.class_names if name not in classes]
    if unknown:
        raise UserError(f"--data {source} has the class {unknown[0]!r}, which is none of {', '.join(classes)}.")
    order = np.array([list(classes).index(name) for name in domain.class_names], np.int64)
    return replace(
        domain, y_train=order[domain.y_train], y_test=order[domain.y_test], class_names=tuple(classes),
        scale=_find_scale(source, data_root(data_dir)),
    )  # fmt: skip


def _find_scale(source: str, root: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """What to normalise by, where the file says it."""
    if source in BUILT_IN or source.startswith(("hf:", "torchvision:")):
        return None
    path = _find(source, root)
    return read_scale(path) if kind_of(path) == "npz" else None


def available(data_dir: Path | None) -> list[dict[str, str]]:
    """The built-in sets and what lies in the data folder, as name, kind and path; nothing is loaded."""
    rows = [{"name": name, "kind": "built in", "path": ""} for name in BUILT_IN]
    root = data_root(data_dir)
    try:
        entries = sorted(root.iterdir())
    except OSError:  # no such folder: only the built-in sets are there
        entries = []
    for path in entries:
        if kind := kind_of(path):
            name = path.stem if path.is_file() else path.name
            rows.append({"name": name, "kind": kind, "path": str(path)})
    return rows


def data_root(data_dir: Path | None) -> Path:
    """The data folder: the one given, else $PROTOFED_DATA, else ./data."""
    return data_dir or Path(os.environ.get("PROTOFED_DATA") or "data")


def _load(name: str, data: Data, root: Path, names: tuple[str, ...] = ()) -> Domain:
    """`names` are those of the classes, where the source has none of its own."""
    rng = np.random.default_rng(FIXED)  # a test part that has to be held back belongs to the data set, not to a run
    where = name
    if name.startswith(MEMORY):
        raise UserError(
            "the data of this run was handed in by a script, and is not kept with it. Hand it in again, as in "
            "result = federate(models, clients, out=..., resume=True); result.export(DIR, client=0) exports a model."
        )
    if name == "digits":
        found = _digits()
    elif name == "spiral":
        found = _spiral(data.counts, data.noise)
    elif name.startswith("hf:"):
        found = from_hub(name.removeprefix("hf:"), root, data.size)
    elif name.startswith("torchvision:"):
        found = from_torchvision(name.removeprefix("torchvision:"), root, data.size)
    else:
        path = _find(name, root)
        where = str(path)
        found = from_hub(where, root, data.size) if kind_of(path) == "hub" else read(path, data.size)
    if names and not found.class_names:
        _refuse_unknown(found, names, where)
        found = replace(found, class_names=names)
    if data.ids:
        found = replace(found, ids=read_ids(_find(data.ids, root), found))
    return as_domain(name, where, found, data, rng)


def _refuse_unknown(found: Found, names: tuple[str, ...], where: str) -> None:
    """Labels without names are numbers of the classes."""
    for y in (pair[1] for pair in (found.train, found.test) if pair is not None and len(pair[1])):
        if y.dtype.kind in "biu" and not 0 <= int(y.min()) <= int(y.max()) < len(names):
            raise UserError(
                f"{where} has labels from {y.min()} to {y.max()}, but there are {len(names)} classes: 0 to "
                f"{len(names) - 1}. Number them so, or save class_names."
            )


def _digits() -> Found:
    """scikit-learn's 8x8 digits, read from its file: loading the library takes as long as a small run."""
    where = find_spec("sklearn")
    assert where is not None
    assert where.origin is not None
    path = Path(where.origin).with_name("datasets") / "data" / "digits.csv.gz"
    if path.is_file():
        with gzip.open(path, "rt", encoding="ascii") as file:
            table = np.loadtxt(file, delimiter=",")
        images, labels = table[:, :-1], table[:, -1].astype(np.int64)
    else:  # another version keeps it elsewhere
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
    return Found(((images / 16).astype(np.float32).reshape(-1, 1, 8, 8), labels))


def _spiral(counts: list[int], noise: float) -> Found:
    """FedNH's six arms, section 3.1: points (N, 2). The test part is balanced: the largest count for each."""
    if not counts or min(counts) < 1 or noise < 0:
        raise UserError(f"spiral needs data.counts of 1 or more and data.noise >= 0, got {counts} and {noise}.")

    def part(index: int, sizes: list[int]) -> Pair:
        points = []
        for k, size in enumerate(sizes):
            along = np.linspace(0, 1, size)  # (i - 1) / (n - 1)
            radius = 1 + 9 * along
            # One generator per class and part: a smaller class does not change the points of the others.
            omega = k / 3 * np.pi * (1 + along) + np.random.default_rng([FIXED, index, k]).normal(0, noise, size)
            points.append(np.stack([radius * np.cos(omega), radius * np.sin(omega)], axis=1))
        return np.concatenate(points).astype(np.float32), np.repeat(np.arange(len(sizes)), sizes)

    return Found(part(0, counts), part(1, [max(counts)] * len(counts)), tuple(str(k) for k in range(len(counts))))


def _find(name: str, root: Path) -> Path:
    """The file or folder of that name: in the data folder, with and without .npz; what has slashes is a path first."""
    inside = [root / name, root / f"{name}.npz"]
    places = list(dict.fromkeys([Path(name), *inside] if Path(name).name != name else [*inside, Path(name)]))
    there = [place for place in places if _exists(place)]
    # A folder that merely has the name of a data set (./mnist of something else) does not hide the data set.
    if usable := [place for place in there if kind_of(place)]:
        return usable[0]
    if there:
        raise UserError(
            f"{there[0]} is not data this reads. Give a .npz file, a folder of IDX files, of CLASS/*.png or "
            "train/CLASS/*.png images, or one written by Hugging Face's save_to_disk."
        )
    known = {row["name"] for row in available(root) if row["kind"] != "ids"}
    looked = ", ".join(map(str, places)) + ("" if root.is_dir() else f" (there is no folder {root})")
    raise UserError(
        f"data.name = {name!r} is no data set: looked for {looked}. {nearest(name, known)} "
        f"Put {Path(name).name}.npz into --data-dir or $PROTOFED_DATA, or use hf:NAME (pip install 'protofed[hub]') "
        "or torchvision:NAME (pip install 'protofed[vision]')."
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long to be a path, or a folder we may not look into
        return False
