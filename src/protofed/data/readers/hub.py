"""Data sets of other libraries: Hugging Face datasets (extra `hub`) and torchvision (extra `vision`)."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protofed.data.readers.files import Found, Pair, stack_images
from protofed.data.readers.kinds import kind_of
from protofed.errors import UserError, did_you_mean, first_line

LABELS = ("label", "labels", "fine_label", "y", "target")


def from_hub(spec: str, root: Path, size: int) -> Found:
    """A data set of the Hugging Face hub, or a local folder that its library reads."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"hf:{spec} needs the package datasets: pip install 'protofed[hub]'.") from None
    where = f"hf:{spec}"
    folder = next((place for place in (Path(spec), root / spec) if kind_of(place) == "hub"), None)
    try:
        loaded: Any = datasets.load_from_disk(str(folder)) if folder else datasets.load_dataset(spec)
        parts: dict[str, Any] = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
        if "train" not in parts and len(parts) != 1:
            raise UserError(f"{where} has the splits {', '.join(parts)}, but none is called train. Save it with one.")
        train = parts.pop("train") if "train" in parts else parts.popitem()[1]
        sample, label = _hub_columns(train.features, where)
        tests = [parts[part] for part in ("test", "validation", "valid", "val") if part in parts]
        # A hidden test part is published without its labels, or with every label -1.
        open_tests = (part for part in tests if label in part.features and np.any(_hub_column(part, label) != -1))
        test = next(open_tests, None)
        pairs = [
            (_hub_samples(part, sample, size, where), _hub_column(part, label))
            for part in (train, test)
            if part is not None
        ]
        owners = [name for name, kind in train.features.items() if name != label and _is_id(kind)]
        ids = {
            name: (_hub_column(train, name), None if test is None else _hub_column(test, name))
            for name in owners
            if test is None or name in test.features
        }
    except (OSError, ValueError, RuntimeError, LookupError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"Cannot load {where} ({first_line(error)}). Check the name and the network; without one, "
            "give a folder written by save_to_disk, as hf:FOLDER."
        ) from None
    names = tuple(str(name) for name in getattr(train.features[label], "names", None) or ())
    return Found(pairs[0], pairs[1] if len(pairs) == 2 else None, names, ids)


def _hub_columns(features: dict[str, Any], where: str) -> tuple[str, str]:
    """The names of the sample column and the label column, found by their types."""
    kinds = {name: type(kind).__name__ for name, kind in features.items()}
    classes = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    named = [name for name in LABELS if name in classes or _dtype(features.get(name)).startswith(("int", "uint"))]
    images = [name for name, kind in kinds.items() if kind == "Image"]
    samples = images or [
        name
        for name, kind in kinds.items()
        if kind != "Value" and _dtype(features[name]).startswith(("int", "uint", "float")) and name not in classes
    ]
    if len(samples) != 1 or not (named or classes):
        columns = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        raise UserError(
            f"{where} must have one column of images or of number lists and a label column (ClassLabel, or whole "
            f"numbers called {', '.join(LABELS)}), got {columns}. Keep or rename columns and save_to_disk that."
        )
    return samples[0], (named or classes)[0]


def _dtype(kind: Any) -> str:
    """The number type at the bottom of a (nested) list type; '' for anything that is not a number or list."""
    while isinstance(kind, list) or hasattr(kind, "feature"):
        kind = kind[0] if isinstance(kind, list) else kind.feature
    return str(getattr(kind, "dtype", None) or "")


def _is_id(kind: Any) -> bool:
    return type(kind).__name__ in ("Value", "ClassLabel") and _dtype(kind).startswith(("int", "uint", "string"))


def _hub_column(part: Any, name: str) -> np.ndarray:
    return np.asarray(part.with_format("numpy")[name][:])


def _hub_samples(part: Any, name: str, size: int, where: str) -> np.ndarray:
    if type(part.features[name]).__name__ != "Image":
        return _hub_column(part, name)
    return stack_images(((f"{where} row {i}", row[name]) for i, row in enumerate(part.select_columns([name]))), size)


def from_torchvision(name: str, root: Path, size: int) -> Found:
    """A data set class of torchvision, from files that are already in the data folder."""
    try:
        from torchvision import datasets as vision
    except ImportError:
        raise UserError(f"torchvision:{name} needs the package torchvision: pip install 'protofed[vision]'.") from None
    known = {key: kind for key, kind in vars(vision).items() if isinstance(kind, type) and hasattr(kind, "__getitem__")}
    if name not in known:
        raise UserError(f"torchvision has no data set {name!r}. {did_you_mean(name, known)}")
    accepts = inspect.signature(known[name]).parameters
    # torchvision says train=True in its older classes and split="train" in its newer ones; a few have one part only.
    options: list[dict[str, Any]] = [{}]
    if "train" in accepts:
        options = [{"train": True}, {"train": False}]
    elif "split" in accepts:
        options = [{"split": "train"}, {"split": "test"}]
    try:
        sets = [known[name](root=str(root), **option) for option in options]
        pairs = [_torchvision_part(part, size, f"torchvision:{name}") for part in sets]
    except (RuntimeError, OSError, ValueError, TypeError, ImportError, LookupError, AssertionError) as error:
        calls = "; ".join(
            f"D.{name}({str(root)!r}, {key}={value!r}, download=True)"
            for option in options
            for key, value in option.items()
        )
        raise UserError(
            f"Cannot load torchvision:{name} from {root} ({first_line(error)}). To fetch it: "
            f'python -c "import torchvision.datasets as D; {calls or f"D.{name}({str(root)!r}, download=True)"}"'
        ) from None
    names = tuple(str(key) for key in getattr(sets[0], "classes", None) or ())
    return Found(pairs[0], pairs[1] if len(pairs) == 2 else None, names)


def _torchvision_part(part: Any, size: int, where: str) -> Pair:
    x, y = getattr(part, "data", None), getattr(part, "targets", getattr(part, "labels", None))
    if isinstance(x, np.ndarray | torch.Tensor) and y is not None and np.ndim(y) == 1 and len(x) == len(y):
        return np.asarray(x), np.asarray(y)
    labels: list[Any] = []

    def images() -> Iterator[tuple[str, object]]:
        for i in range(len(part)):
            image, label = part[i]
            labels.append(label)
            yield f"{where} row {i}", image

    return stack_images(images(), size), np.asarray(labels)
