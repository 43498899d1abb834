"""Folders in the layout of PFLlib and HtFLlib: `train/I.npz` and `test/I.npz` for client I, and `config.json`."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from protofed.data.readers.files import AGAIN, BROKEN_NPZ, Found, Pair
from protofed.data.readers.objects import read_objects
from protofed.errors import UserError, first_line

OWNER = "client"  # the owner column that says whose a sample is
MOST_CLASSES = 100_000


def read_pfllib(folder: Path) -> Found:
    """All clients' samples, one client's after another's, and whose they are: `partition = natural` deals them so."""
    config = _config(folder)
    parts = {part: _files(folder / part) for part in ("train", "test")}
    numbers = sorted(parts["train"])
    clients = config.get("num_clients", len(numbers))
    if odd := sorted(set(numbers) ^ set(parts["test"])):
        raise UserError(
            f"{folder}: client {odd[0]} has no train/{odd[0]}.npz or no test/{odd[0]}.npz. Copy the whole folder again."
        )
    if not numbers:
        raise UserError(
            f"{folder / 'train'} has no file I.npz, where I is a client's number. Copy the whole folder again."
        )
    if clients != len(numbers):
        raise UserError(
            f"{folder / 'config.json'} says num_clients = {clients!r:.40}, but train/ has {len(numbers)} files. "
            "Copy the whole folder again."
        )
    train, owners = _joined(parts["train"])
    test, test_owners = _joined(parts["test"])
    return Found(train, test, _class_names(config, folder), {OWNER: (owners, test_owners)})


def _files(folder: Path) -> dict[int, Path]:
    """Client -> file."""
    return {int(path.stem): path for path in folder.glob("*.npz") if path.stem.isascii() and path.stem.isdigit()}


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"Cannot read {path} ({first_line(error)}). {AGAIN}") from None
    return found if isinstance(found, dict) else {}


def _class_names(config: dict[str, Any], folder: Path) -> tuple[str, ...]:
    """The classes by number, including those without samples; none if the folder does not say."""
    many = config.get("num_classes")
    if many is None:
        return ()
    if type(many) is not int or not 1 <= many <= MOST_CLASSES:
        raise UserError(f"{folder / 'config.json'}: num_classes = {many!r:.40} should be a number from 1. Correct it.")
    return tuple(map(str, range(many)))


def _joined(files: dict[int, Path]) -> tuple[Pair, np.ndarray]:
    """The samples and labels of all files, and the client of each."""
    pairs = [_read(files[number]) for number in sorted(files)]
    shape = pairs[0][0].shape[1:]
    for number, (x, _) in zip(sorted(files), pairs, strict=True):
        if x.shape[1:] != shape:
            raise UserError(
                f"{files[number]} has samples of shape {x.shape[1:]}, the first client's have {shape}. All clients of "
                "a folder have samples of one shape."
            )
    xs, ys = zip(*pairs, strict=True)
    owners = np.repeat(sorted(files), [len(y) for y in ys])
    return (np.concatenate(xs), np.concatenate(ys)), owners


def _read(path: Path) -> Pair:
    """A client's samples: arrays x and y, by themselves or in the dict that PFLlib saves as `data`."""
    try:
        found = read_objects(path)
    except BROKEN_NPZ as error:
        raise UserError(f"Cannot read {path} ({first_line(error)}). {AGAIN}") from None
    found = found["data"] if isinstance(found.get("data"), dict) else found
    if missing := [name for name in ("x", "y") if name not in found]:
        there = ", ".join(map(str, found)) or "nothing"
        raise UserError(
            f"{path} has no {' and no '.join(missing)} (it has: {there:.80}). Save data={{'x': x, 'y': y}}."
        )
    x, y = found["x"], found["y"]
    if isinstance(y, list) and all(type(label) is int for label in y):
        try:
            y = np.array(y, np.int64)
        except OverflowError:
            raise UserError(
                f"{path}: a label is too large for a number of 64 bits. Number the classes from 0."
            ) from None
    for name, array in (("x", x), ("y", y)):
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
            raise UserError(
                f"{path}: {name} is not an array of numbers but {type(array).__name__}. Where the file was made, save "
                "arrays: np.savez(path, x=np.stack(data['x']), y=np.array(data['y']))."
            )
    if len(x) != len(y) or x.ndim < 2 or y.ndim != 1:
        raise UserError(f"{path}: x has shape {x.shape} and y {y.shape}. There must be one label for each sample.")
    return x, y
