"""The user's own data: tensors, arrays, torch Datasets and Hugging Face datasets, with labels of any kind."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from protofed.data.domain import Domain
from protofed.data.readers.checked import hold_back
from protofed.data.readers.forms import INPUTS, LABELS, frame_as_numbers, inputs_and_labels, is_arrays, refuse_half
from protofed.data.readers.labels import class_names_of, known_classes, numbered, read_labels
from protofed.errors import UserError
from protofed.importing import error_in_words

SLOW = 2.0  # seconds of reading after which progress is shown
Tell = Callable[[str], None]


class Part(NamedTuple):
    """Inputs (N, ...) and labels (N,) of any kind."""

    x: np.ndarray
    y: list[Any]

    def __repr__(self) -> str:
        return f"<Part: {len(self.y)} samples of shape {self.x.shape[1:]}>"  # no samples: it may end up in a log


class Own(NamedTuple):
    """All clients' data with one numbering of the classes."""

    domains: list[Domain]
    labels: list[Any]  # what the user calls class 0, 1, ...
    notes: list[str]


def read_clients(
    clients: Any, tests: Any = None, labels: Sequence[Any] | None = None, *, test_fraction: float, seed: int,
    tell: Tell = lambda text: None,
) -> Own:  # fmt: skip
    """One domain per client; without its own test data, a share is held back, class by class."""
    named = _named(clients)
    given = _tests(tests, named)
    pairs: dict[str, tuple[Part, Part | None]] = {}
    for name, source in named.items():
        train, test = split_parts(source)
        test = given.get(name, test)
        pairs[name] = (
            read_part(train, name, tell),
            None if test is None else read_part(test, f"{name} (test)", tell),
        )
    return _numbered(pairs, labels, test_fraction, seed)


def _named(clients: Any) -> dict[str, Any]:
    """Each client's data by its name."""
    if isinstance(clients, Mapping) and not _is_hub(clients) and "train" not in clients:
        found = {str(name): source for name, source in clients.items()}
    elif isinstance(clients, list | Iterator) or (isinstance(clients, tuple) and not is_arrays(clients)):
        found = {f"client {number}": source for number, source in enumerate(clients)}
    else:
        raise UserError(
            f"clients is {type(clients).__name__}. Give a list with one (x, y), Dataset or Hugging Face dataset for "
            "each client, or a dict of them by name."
        )
    if not found:
        raise UserError("clients is empty. Give a list with one (x, y) or Dataset for each client.")
    return found


def _tests(tests: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """Each client's test data, if given separately: one for each, or one for all."""
    if tests is None:
        return {}
    if isinstance(tests, Mapping) and not _is_hub(tests):
        return {str(name): source for name, source in tests.items()}
    if isinstance(tests, list):
        if len(tests) != len(named):
            raise UserError(f"there is test data for {len(tests)} of {len(named)} clients. Give one for each, or one.")
        return dict(zip(named, tests, strict=True))
    return dict.fromkeys(named, tests)


def split_parts(source: Any) -> tuple[Any, Any]:
    """The train and test parts of one client's data; None if there is no test part."""
    if isinstance(source, Mapping) and "train" in source:
        test = next((source[name] for name in ("test", "validation", "valid", "val") if name in source), None)
        return source["train"], test
    if isinstance(source, tuple | list) and len(source) == 4:
        return tuple(source[:2]), tuple(source[2:])
    if isinstance(source, tuple | list) and len(source) == 2 and _is_pair_of_sets(source):
        return source[0], source[1]
    return source, None


def _is_pair_of_sets(source: Sequence[Any]) -> bool:
    return all((isinstance(part, tuple) and len(part) == 2) or hasattr(part, "__getitems__") or _is_hub(part)
               or isinstance(part, torch.utils.data.Dataset | DataLoader) for part in source)  # fmt: skip


def _is_hub(source: Any) -> bool:
    """Whether it is a Hugging Face dataset, or a dict of them."""
    return hasattr(source, "column_names") and (hasattr(source, "features") or isinstance(source, Mapping))


def read_part(source: Any, where: str, tell: Tell) -> Part:
    """Inputs and labels of one part of one client."""
    if isinstance(source, DataLoader):
        source = source.dataset
    if isinstance(source, Mapping) and not _is_hub(source):
        source = inputs_and_labels(source, where)
    if isinstance(source, tuple | list) and len(source) == 2:
        x, y = as_array(source[0], where), read_labels(source[1], where)
    elif isinstance(source, TensorDataset) and len(source.tensors) == 2:
        x, y = as_array(source.tensors[0], where), read_labels(source.tensors[1], where)
    elif _is_hub(source):
        x, y = _from_hub(source, where)
    elif isinstance(source, IterableDataset) or (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        refuse_half(source, where)
        x, y = _from_items(source, where, tell)
    else:
        raise UserError(f"{where}: its data is {type(source).__name__}. Give (x, y), or a Dataset of such pairs.")
    if len(x) != len(y):
        raise UserError(f"{where} has {len(x)} samples but {len(y)} labels. Give one label for each sample.")
    return Part(x, y)


def _from_hub(source: Any, where: str) -> tuple[np.ndarray, list[Any]]:
    """The columns of a Hugging Face dataset; class numbers become their names."""
    label = next((name for name in LABELS if name in source.column_names), None) or _class_column(source)
    inputs = [name for name in INPUTS if name in source.column_names and name != label]
    others = [name for name in source.column_names if name != label]
    column = inputs[0] if inputs else others[0] if len(others) == 1 else None
    if label is None or column is None:
        raise UserError(
            f"{where}: a Hugging Face dataset needs a column of inputs ({', '.join(INPUTS[:5])}, ...) and one of "
            f"labels ({', '.join(LABELS[:3])}, ...), got {', '.join(source.column_names)}. Rename them: rename_column."
        )
    plain = source.with_format(None)
    names = getattr(source.features[label], "names", None)
    y = list(plain[label])
    if names:
        y = [names[n] if isinstance(n, int) and 0 <= n < len(names) else n for n in y]
    rows = list(plain[column])
    if rows and hasattr(rows[0], "convert"):
        rows = [_picture(row) for row in rows]
    return _stacked(rows, where), read_labels(y, where)


def _class_column(source: Any) -> str | None:
    """The only column whose type is a class label, or the one of two columns that holds single values."""
    kinds = source.features or {}
    classes = [name for name, kind in kinds.items() if hasattr(kind, "names")]
    single = [name for name, kind in kinds.items() if type(kind).__name__ == "Value"]
    found = classes or (single if len(kinds) == 2 else [])
    return found[0] if len(found) == 1 else None


def _from_items(source: Any, where: str, tell: Tell) -> tuple[np.ndarray, list[Any]]:
    """Every item of a Dataset; the error names one that fails."""
    rows: list[np.ndarray] = []
    labels: list[Any] = []
    size = len(source) if hasattr(source, "__len__") else None
    started = told_at = time.monotonic()
    items: Iterable[Any] = iter(source) if isinstance(source, IterableDataset) else range(size or 0)
    index = -1
    try:
        for index, item in enumerate(items):
            x, y = _pair(item if isinstance(source, IterableDataset) else source[index], f"{where}, sample {index}")
            rows.append(x)
            labels.append(y)
            now = time.monotonic()
            if size and now - told_at > SLOW:
                told_at = now
                left = (now - started) / (index + 1) * (size - index - 1)
                tell(f"reading {where}: {index + 1} of {size} samples, {left:.0f} s to go")
    except UserError:
        raise
    except Exception as error:
        number = index + 1 if isinstance(source, IterableDataset) else index
        raise UserError(
            f"{where}: reading sample {number} of its data set raises {error_in_words(error)}. Correct the data set."
        ) from error
    return _stacked(rows, where), read_labels(labels, where)


def _pair(item: Any, where: str) -> tuple[np.ndarray, Any]:
    if isinstance(item, Mapping):
        names = [next((name for name in some if name in item), None) for some in (INPUTS, LABELS)]
        if None in names:
            raise UserError(
                f"{where} has the keys {', '.join(map(str, item))}, but no input and label. Call them x, y."
            )
        item = tuple(item[name] for name in names)
    if not isinstance(item, tuple | list) or len(item) != 2:
        got = f"{type(item).__name__}" + (f" of {len(item)}" if isinstance(item, tuple | list) else "")
        raise UserError(f"{where} is {got}, not a pair of input and label. Give (x, y).")
    x, y = item
    return (_picture(x) if hasattr(x, "convert") else np.asarray(_plain(x))), y


def _picture(image: Any) -> np.ndarray:
    """A Pillow image as (channels, height, width)."""
    pixels = np.asarray(image if image.mode in ("L", "RGB") else image.convert("RGB"))
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _stacked(rows: Sequence[Any], where: str) -> np.ndarray:
    arrays = [np.asarray(_plain(row)) for row in rows]
    odd = next((i for i, row in enumerate(arrays) if row.shape != arrays[0].shape), None)
    if odd is not None:
        raise UserError(
            f"{where}: sample {odd} has shape {arrays[odd].shape}, sample 0 {arrays[0].shape}. Resize, pad or cut them "
            "to one shape."
        )
    return as_array(np.stack(arrays) if arrays else np.zeros((0, 1), np.float32), where)


def _plain(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        x = x.detach().cpu()
        return (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x).numpy()
    return x


def as_array(x: Any, where: str) -> np.ndarray:
    """Inputs (N, ...): byte images as uint8, other whole numbers as int64 (tokens), everything else as float32."""
    if isinstance(x, list | tuple) and x and not isinstance(x[0], int | float):
        return _stacked(x, where)
    try:
        array = np.asarray(_plain(frame_as_numbers(x, where)))
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{where}: its samples cannot be read as numbers: {error_in_words(error)}.") from None
    if array.dtype.kind in "USO":
        kind = "text" if array.dtype.kind in "US" or isinstance(array.ravel()[:1].tolist()[0], str) else "objects"
        raise UserError(f"{where}: its samples are {kind}, not numbers. Turn text into token ids, objects into arrays.")
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        raise UserError(f"{where}: its samples are {array.dtype} of shape {array.shape}. Give numbers (samples, ...).")
    array = array[:, None] if array.ndim == 1 else array
    if array.dtype == np.uint8 and array.ndim >= 3:
        return np.ascontiguousarray(array)
    if array.dtype.kind in "iu":
        return np.ascontiguousarray(array, np.int64)
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(array, np.float32)
    fine = np.isfinite(array) if array.ndim > 2 else ~np.isinf(array)  # NaN in a table is a missing value
    bad = np.flatnonzero(~fine.all(axis=tuple(range(1, array.ndim))))
    if len(bad):
        raise UserError(f"{where}: sample {bad[0]} holds NaN or infinite values. Remove or replace those.")
    return array


def _numbered(
    pairs: Mapping[str, tuple[Part, Part | None]], labels: Sequence[Any] | None, fraction: float, seed: int
) -> Own:
    """The clients' parts as domains."""
    for name, (train, _) in pairs.items():
        if not train.y:
            raise UserError(f"{name} has no samples. Leave it out.")
    kinds = {part.x.dtype for pair in pairs.values() for part in pair if part is not None and part.y}
    floats = len(kinds) > 1  # one client's table may happen to hold only whole numbers
    found = {name: train.y for name, (train, _) in pairs.items()}
    found |= {f"{name} (test)": test.y for name, (_, test) in pairs.items() if test is not None}
    classes = known_classes(found, labels)
    names = class_names_of(classes)
    notes: list[str] = []
    domains = []
    for number, (name, (train, test)) in enumerate(pairs.items()):
        y = numbered(train.y, classes, name)
        x = _floats(train.x) if floats else train.x
        if test is None:
            rng = np.random.default_rng([seed, 0x7E57, number])
            kept, held = hold_back(y, fraction, rng) if fraction else (np.arange(len(y)), np.zeros(0, np.int64))
            parts = (x[kept], y[kept], x[held], y[held])
        else:
            if test.y and test.x.shape[1:] != x.shape[1:]:
                raise UserError(
                    f"{name}: training samples have shape {x.shape[1:]}, test samples {test.x.shape[1:]}. "
                    "Give one shape."
                )
            x_test = (_floats(test.x) if floats else test.x) if test.y else x[:0]
            parts = (x, y, x_test, numbered(test.y, classes, f"{name} (test)"))
        domains.append(Domain(name, *parts, names))
    notes += [*_doubts(classes, sum(map(len, found.values()))), *_remarks(domains, classes)]
    return Own(domains, classes, notes)


def _floats(x: np.ndarray) -> np.ndarray:
    return (x / np.float32(255)).astype(np.float32) if x.dtype == np.uint8 else x.astype(np.float32)


def _doubts(classes: Sequence[Any], samples: int) -> list[str]:
    """Warnings if the given labels may not be classes at all."""
    kind = type(classes[0])
    compared = any("__eq__" in vars(base) for base in kind.__mro__[:-1])  # all but object
    if not compared and not issubclass(kind, Enum):
        return [
            f"labels are objects of the class {kind.__name__}, and each counts as a separate class ({len(classes)} "
            f"classes in {samples} samples), since Python cannot tell which are equal. Give text or numbers, or "
            f"define __eq__ and __hash__ in {kind.__name__}."
        ]
    if samples < 2 * len(classes) > 4:
        return [
            f"there are {len(classes)} classes in {samples} samples. Are the labels classes, such as {classes[0]!r}?"
        ]
    return []


def _remarks(domains: Sequence[Domain], classes: Sequence[Any]) -> list[str]:
    """What the user may want to know about this data."""
    notes = []
    has = np.array([np.bincount(d.y_train, minlength=len(classes)) for d in domains])
    owners = (has > 0).sum(0)
    alone = [d.name for d, row in zip(domains, has, strict=True) if not (owners[row > 0] > 1).any()]
    if len(domains) > 1 and alone:
        notes.append(f"no class in common with any other client: {_some(alone)}. They gain nothing from each other.")
    single = [
        f"{d.name} of {classes[c]!r}"
        for d, row in zip(domains, has, strict=True)
        for c in np.flatnonzero(row == 1).tolist()
    ]
    if single:
        notes.append(f"only one training sample: {_some(single)}.")
    unseen = [repr(classes[c]) for c in np.flatnonzero(owners == 0).tolist()]
    if unseen:
        notes.append(f"nobody has training samples of {_some(unseen)}.")
    large = [d.name for d in domains if d.x_train.dtype == np.float32 and np.abs(d.x_train).max() > 50]
    if large:
        notes.append(
            f"inputs of {_some(large)} reach beyond 50: most networks train better on inputs of mean 0 and deviation 1."
        )
    return notes


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
