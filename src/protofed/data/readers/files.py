"""Readers of files on disk: .npz files, IDX files, image folders. Their errors name the file."""

import gzip
import lzma
import math
import os
import re
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from protofed.errors import UserError, first_line

Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Found:
    """What a reader found, not checked yet. A missing test part is split off later."""

    train: Pair
    test: Pair | None = None
    class_names: tuple[str, ...] = ()
    ids: dict[str, tuple[np.ndarray, np.ndarray | None]] = field(default_factory=dict)


IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
IDX_NAME = re.compile(r"(train|t10k)-(images|labels)[-.]idx[13]-ubyte(\.gz)?")
IDX_DTYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
AGAIN = "The file is damaged or cut short: copy or download it again."

ABOUT = {"x", "y", "class_names", "classes", "mean", "std"}  # arrays with a meaning of their own

# What numpy and zipfile raise on a damaged archive; a flipped bit in a header may also ask for terabytes.
BROKEN_NPZ = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError, NotImplementedError),
    *(RuntimeError, struct.error, SyntaxError, tokenize.TokenError, MemoryError),
)
# What Pillow raises on a damaged image: a broken PNG is a SyntaxError.
BROKEN_IMAGE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)


def check_unpacked(path: Path) -> None:
    """A UserError if an archive is larger, unpacked, than this machine's memory; somebody may have built it to be."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
    except BROKEN_NPZ:  # reading the file will raise an error
        return
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > room:
        raise UserError(f"{path} has {size:,} bytes unpacked, and this machine a memory of {room:,}. Split it.")


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        if not zipfile.is_zipfile(path):
            raise UserError(f"{path} is not a whole .npz (zip) file. {AGAIN}")
        check_unpacked(path)
        with np.load(path, allow_pickle=False) as archive:
            members = {name: archive[name] for name in archive.files}
    except BROKEN_NPZ as error:
        if "allow_pickle" in str(error):
            raise UserError(f"{path} holds Python objects, which are never loaded. Save plain number arrays.") from None
        raise UserError(f"Cannot read {path} ({first_line(error)}). {AGAIN}") from None
    # At least one dimension, so that everything has a length; a lone number is refused later for its shape.
    return {name: np.atleast_1d(value) for name, value in members.items() if isinstance(value, np.ndarray)}


def read_npz(path: Path) -> Found:
    """The arrays of a file by their names: x_train, y_train and what goes with them."""
    arrays = _arrays(path)
    there = ", ".join(sorted(arrays)) or "nothing"
    for name in ("x", "y", *_short_columns(arrays)):  # without a test part, short names are accepted too
        if name in arrays and f"{name}_train" not in arrays:
            arrays[f"{name}_train"] = arrays.pop(name)
    short = any(name in there.split(", ") for name in "xy")  # the other one is then called so too
    missing = [name[:1] if short else name for name in ("x_train", "y_train") if name not in arrays]
    if ("x_test" in arrays) != ("y_test" in arrays):
        missing.append("x_test" if "y_test" in arrays else "y_test")
    if missing:
        slips = [name for name in there.split(", ") if name != name.lower() and name.lower().startswith(("x", "y"))]
        small = f"Names are in small letters: {slips[0].lower()}, not {slips[0]}. " if slips else ""
        raise UserError(
            f"{path} has no {' and no '.join(missing)} (it has: {there}). {small}"
            "Save x_train, y_train and, if there is a test part, x_test and y_test; a table of owners goes in data.ids."
        )
    named = arrays.get("class_names", _classes(arrays))
    names = tuple(str(name) for name in named.astype(str).ravel())
    names = _number_text(arrays, names, path)
    train = arrays["x_train"], arrays["y_train"]
    test = (arrays["x_test"], arrays["y_test"]) if "x_test" in arrays else None
    ids: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}
    for name in _columns(arrays):
        first, second = arrays[f"{name}_train"], arrays.get(f"{name}_test") if test else None
        # Ignore extra arrays of another shape: they hold something else about the data.
        if _rows(first) == len(train[0]) and (test is None or _rows(second) == len(test[0])):
            ids[name] = first, second
    return Found(train, test, names, ids)


def _classes(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """An array called `classes`, if it has a name for every label; otherwise it is something else."""
    found, y = arrays.get("classes", np.zeros(0)), arrays["y_train"]
    fits = found.ndim == 1 and found.dtype.kind in "US" and y.dtype.kind in "iu" and len(y) > 0
    return found if fits and 0 <= y.min() <= y.max() < len(found) else np.array([], str)


def _number_text(arrays: dict[str, np.ndarray], names: tuple[str, ...], path: Path) -> tuple[str, ...]:
    """Replace text labels by numbers, in place; returns the names of the classes."""
    keys = [key for key in ("y_train", "y_test") if key in arrays]
    if any(arrays[key].dtype.kind not in "US" or arrays[key].ndim != 1 for key in keys):
        return names
    found = np.unique(np.concatenate([arrays[key].astype(str) for key in keys]))
    known = names or tuple(str(name) for name in found)
    unknown = [name for name in found if name not in known]
    if unknown:
        raise UserError(f"{path} has a label {str(unknown[0])!r} that is not in its class_names. Name it there.")
    for key in keys:
        arrays[key] = np.array([known.index(name) for name in arrays[key].astype(str)], dtype=np.int64)
    return known


def read_scale(path: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """Mean and deviation to normalise by, if a file has both."""
    arrays = _arrays(path)
    if not {"mean", "std"} <= set(arrays):
        return None
    mean, std = arrays["mean"].astype(np.float32), arrays["std"].astype(np.float32)
    if mean.shape != std.shape or not np.isfinite(mean).all() or not (std > 0).all():
        raise UserError(f"{path}: mean and std must have one shape and be numbers, std above 0. Save them so.")
    return mean, std


def read_ids(path: Path, found: Found) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
    """The columns of a side table, each checked to go row for row with the data."""
    arrays = _arrays(path)
    columns: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}
    parts = {"train": found.train, "test": found.test}
    for name in _columns(arrays):
        pair = []
        for part, samples in parts.items():
            if samples is None:
                continue
            column = arrays.get(f"{name}_{part}")
            if column is None or _rows(column) != len(samples[0]):
                got = "no such array" if column is None else f"shape {column.shape}"
                raise UserError(
                    f"{path}: {name}_{part} must be one id for each of the {len(samples[0])} {part} samples, "
                    f"got {got}. Give the table that was made for this data set."
                )
            pair.append(column)
        columns[name] = pair[0], pair[1] if len(pair) == 2 else None
    if not columns:
        raise UserError(
            f"{path} holds no ids (it has: {', '.join(sorted(arrays))}). Save arrays NAME_train, NAME_test."
        )
    return columns


def _short_columns(arrays: dict[str, np.ndarray]) -> list[str]:
    """The names of arrays with one value per row of x, if the file calls its samples x."""
    if "x" not in arrays or {"x_train", "x_test"} & set(arrays):
        return []
    size = len(arrays["x"])
    return [name for name, array in arrays.items() if name not in ABOUT and _rows(array) == size]


def _columns(arrays: dict[str, np.ndarray]) -> list[str]:
    names = [name.removesuffix("_train") for name in arrays if name.endswith("_train")]
    return [name for name in names if name not in ("x", "y")]


def _rows(column: np.ndarray | None) -> int:
    """The length of a 1-D array; -1 for anything else."""
    return -1 if column is None or column.ndim != 1 else len(column)


def idx_files(folder: Path) -> dict[tuple[str, str], Path]:
    """(train or t10k, images or labels) -> file; an unpacked file wins over its .gz."""
    files = {}
    # torchvision keeps the files it downloads one level down, in raw/.
    for place in (folder / "raw", folder):
        for path in sorted(place.iterdir(), reverse=True) if place.is_dir() else ():
            if match := IDX_NAME.fullmatch(path.name):
                files[match[1], match[2]] = path
    return files


def read_idx(folder: Path) -> Found:
    """MNIST's files, as they are published."""
    files = idx_files(folder)
    parts: dict[str, Pair] = {}
    for part in ("train", "t10k"):
        if part == "t10k" and not any(key[0] == part for key in files):
            continue
        for what in ("images", "labels"):
            if (part, what) not in files:
                raise UserError(f"{folder} has no {part}-{what}-idx*-ubyte[.gz]. Put it next to the other IDX files.")
        parts[part] = _idx(files[part, "images"]), _idx(files[part, "labels"])
    return Found(parts["train"], parts.get("t10k"))


def _idx(path: Path) -> np.ndarray:
    """One IDX file: two zero bytes, the type, the number of dimensions, each dimension, then the values."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"Cannot read {path} ({first_line(error)}). {AGAIN}") from None
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in IDX_DTYPES or not raw[3]:
        raise UserError(f"{path} is not an IDX file: it starts with {raw[:4].hex() or 'nothing'}. {AGAIN}")
    start = 4 + 4 * raw[3]
    if len(raw) < start:
        raise UserError(f"{path} ends inside its header. {AGAIN}")
    shape = struct.unpack(f">{raw[3]}I", raw[4:start])
    dtype = np.dtype(IDX_DTYPES[raw[2]])
    if len(raw) - start != math.prod(shape) * dtype.itemsize:
        raise UserError(f"{path} promises {shape} values but holds {len(raw) - start} bytes of them. {AGAIN}")
    return np.frombuffer(raw, dtype, offset=start).reshape(shape).copy()


def subfolders(folder: Path) -> dict[str, Path]:
    """Name -> subfolder in sorted order, without what tools leave behind (.git, __MACOSX)."""
    return {path.name: path for path in sorted(folder.iterdir()) if path.is_dir() and path.name[:1] not in "._"}


def _images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if is_image(path))


def is_image(path: Path) -> bool:
    """By its name."""
    return path.suffix.lower() in IMAGES and not path.name.startswith(".")


def read_images(folder: Path, size: int) -> Found:
    """CLASS/*.png, or train/CLASS/*.png and test/CLASS/*.png."""
    top = subfolders(folder)
    test = next((top[name] for name in ("test", "val", "valid", "validation") if name in top), None)
    if "train" not in top:
        names = tuple(top)
        return Found(_labelled(folder, names, size), None, names)
    names = tuple(subfolders(top["train"]))
    if test and (unknown := sorted(set(subfolders(test)) - set(names))):
        raise UserError(
            f"{test} has the class folder {unknown[0]!r}, which {top['train']} does not have. "
            "Use the same class folders in both."
        )
    return Found(_labelled(top["train"], names, size), _labelled(test, names, size) if test else None, names)


def _labelled(folder: Path, names: tuple[str, ...], size: int) -> Pair:
    files, labels = [], []
    for label, name in enumerate(names):
        if not (folder / name).is_dir():
            continue
        images = _images(folder / name)
        if not images:
            raise UserError(f"{folder / name} holds no images. Put some there, or remove the folder.")
        files += images
        labels += [label] * len(images)
    if not files:
        raise UserError(f"{folder} has no class folders with images. Use {folder.name}/CLASS/*.png, or remove it.")
    return stack_images(((str(path), path) for path in files), size), np.array(labels)


def stack_images(images: Iterable[tuple[str, object]], size: int) -> np.ndarray:
    """Pairs (where, path or Pillow image) -> uint8 (N, channels, height, width); grey only if all are grey."""
    arrays: list[np.ndarray] = []
    places: list[str] = []
    for where, source in images:
        try:
            with source if isinstance(source, Image.Image) else Image.open(source) as image:  # type: ignore[arg-type]
                arrays.append(_pixels(image, size, where))
        except (*BROKEN_IMAGE, AttributeError) as error:  # AttributeError: the cell is not an image
            raise UserError(f"Cannot read the image {where} ({first_line(error)}). Replace or remove it.") from None
        places.append(where)
        if arrays[-1].shape[:2] != arrays[0].shape[:2]:
            (h, w), (h0, w0) = arrays[-1].shape[:2], arrays[0].shape[:2]
            raise UserError(
                f"Images of different sizes: {places[0]} is {w0}x{h0}, {where} is {w}x{h}. "
                "Set data.size, e.g. data.size=32."
            )
    if all(array.ndim == 2 for array in arrays):
        return np.stack(arrays)[:, None]
    colour = [array if array.ndim == 3 else np.repeat(array[..., None], 3, axis=2) for array in arrays]
    return np.ascontiguousarray(np.stack(colour).transpose(0, 3, 1, 2))


def _pixels(image: Image.Image, size: int, where: str) -> np.ndarray:
    """uint8 (height, width) for grey, (height, width, 3) for anything else; transparency is dropped."""
    if image.mode == "F":
        raise UserError(f"{where} holds floating-point pixels. Save such data as .npz.")
    if image.mode.startswith("I"):
        # 16-bit grey: Pillow's own conversion to 8 bits clips, which would give white images.
        image = Image.fromarray(np.clip(np.asarray(image) >> 8, 0, 255).astype(np.uint8))
    image = image.convert("L" if image.mode in ("1", "L", "LA", "La") else "RGB")
    if size:
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image)
