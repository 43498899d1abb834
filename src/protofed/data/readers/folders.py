"""Folders in which others publish handwriting with its writers: LEAF's JSON, and NIST SD19 by class."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from protofed.data.readers.files import AGAIN, IMAGES, Found, Pair, stack_images
from protofed.errors import UserError, first_line

LEAF = "train", "all_data"  # the folders of LEAF's preprocessing that hold samples to learn from
HEXADECIMAL = re.compile(r"[0-9a-f]{2}")  # SD19's classes, as codes of characters: 30 is "0", 61 is "a"
TEST_FORMS = "hsf_4"  # SD19's forms by high-school students, which NIST sets aside for tests
LONGEST = 200  # characters of a user's name: every sample has it
SIDE = 28  # LEAF's images of FEMNIST are rows of 784 numbers


def folder_kind(folder: Path) -> str:
    """'leaf', 'sd19' or ''."""
    if any(next((folder / name).glob("*.json"), None) for name in LEAF):
        return "leaf"
    return "sd19" if _classes(folder) else ""


def read_folder(folder: Path, size: int) -> Found:
    """The data in such a folder."""
    return _read_leaf(folder) if folder_kind(folder) == "leaf" else _read_sd19(folder, size)


def _read_leaf(folder: Path) -> Found:
    """All users' samples, the users as the owner column `user`."""
    train = _leaf_part(folder / next(name for name in LEAF if (folder / name).is_dir()))
    test = _leaf_part(folder / "test") if next((folder / "test").glob("*.json"), None) else None
    users = {"user": (train[1], test[1] if test else None)}
    return Found(train[0], test[0] if test else None, (), users)


def _leaf_part(folder: Path) -> tuple[Pair, np.ndarray]:
    """Samples, labels and the user of each, over all files of a folder, in the order of their names."""
    xs, ys, users = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for path in sorted(folder.glob("*.json")):
        for user, samples in _leaf_users(path).items():
            x, y = _leaf_samples(samples, f"{path}, user {user!r}")
            xs.append(x)
            ys.append(y)
            users.append(np.full(len(y), user))
    shapes = {x.shape[1:] for x in xs}
    if len(shapes) != 1:
        raise UserError(f"{folder} has samples of {len(shapes)} shapes, and all must have one. {AGAIN}")
    return (np.concatenate(xs), np.concatenate(ys)), np.concatenate(users)


def _leaf_users(path: Path) -> dict[str, Any]:
    """A file's users that have samples."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"Cannot read {path} ({first_line(error)}). {AGAIN}") from None
    users = found.get("user_data") if isinstance(found, dict) else None
    if not isinstance(users, dict) or not all(
        isinstance(one, dict) and {"x", "y"} <= set(one) for one in users.values()
    ):
        raise UserError(f"{path} is not in LEAF's form: it needs user_data, with x and y of every user. {AGAIN}")
    if (longest := max(map(len, users), default=0)) > LONGEST:
        raise UserError(f"{path} has a user with a name of {longest:,} characters, and {LONGEST} are read at most.")
    return {user: one for user, one in users.items() if one["y"]}


def _leaf_samples(samples: dict[str, Any], where: str) -> Pair:
    try:
        x, y = np.asarray(samples["x"], np.float32), np.asarray(samples["y"])
    except (ValueError, TypeError, OverflowError):
        raise UserError(
            f"{where}: samples must be lists of numbers of one length. Other data of LEAF is not read."
        ) from None
    if x.ndim < 2 or y.shape != (len(x),):
        raise UserError(f"{where}: labels of shape {y.shape} for samples of shape {x.shape}. {AGAIN}")
    return (x.reshape(-1, SIDE, SIDE) if x.shape[1:] == (SIDE * SIDE,) else x), y


def _classes(folder: Path) -> dict[str, Path]:
    """SD19's folders of classes by their character: of the folder itself, or of `by_class` in it."""
    for place in (folder / "by_class", folder):
        inner = [path for path in sorted(place.iterdir()) if path.is_dir()] if place.is_dir() else []
        found = {chr(int(path.name, 16)): path for path in inner if HEXADECIMAL.fullmatch(path.name) and _forms(path)}
        if found:
            return found
    return {}


def _forms(folder: Path) -> list[Path]:
    """The folders of images of one class."""
    return [p for p in sorted(folder.iterdir()) if p.is_dir() and p.name.startswith(("hsf_", f"train_{folder.name}"))]


def _read_sd19(folder: Path, size: int) -> Found:
    """NIST's own parts: `train_XX`, or all forms but hsf_4, to learn from; hsf_4 to test on."""
    classes = _classes(folder)
    parts: dict[bool, list[tuple[int, Path]]] = {True: [], False: []}
    for label, place in enumerate(classes.values()):
        forms = {form.name: form for form in _forms(place)}
        ready = f"train_{place.name}"  # the same images as those of the forms, once more
        for name, form in forms.items():
            if name in (TEST_FORMS, ready) or ready not in forms:
                images = (path for path in sorted(form.iterdir()) if path.suffix.lower() in IMAGES)
                parts[name == TEST_FORMS] += [(label, path) for path in images]
    if not parts[False]:
        raise UserError(f"{folder} holds no images in its folders train_XX or hsf_N. {AGAIN}")
    train, test = (_pictures(parts[held], size) for held in (False, True))
    assert train is not None
    return Found(train, test, tuple(classes))


def _pictures(files: list[tuple[int, Path]], size: int) -> Pair | None:
    if not files:
        return None
    return stack_images(((str(path), path) for _, path in files), size), np.array([label for label, _ in files])
