"""Sources of data: two built-in sets, files and folders, Hugging Face datasets, torchvision."""

import gzip
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from protofed.data import Data as Data
from protofed.data.computed import Computed, Gaussians
from protofed.data.domain import Domain
from protofed.data.readers.checked import as_domain, join_parts, same_classes
from protofed.data.readers.files import Found, Pair, read_ids, read_scale
from protofed.data.readers.kinds import kind_of, read_arrays
from protofed.errors import UserError, did_you_mean, option
from protofed.importing import MEMORY, error_in_words, imported, is_path

BUILT_IN = ("digits", "spiral", "gaussians")
# digits and spiral are fixed data sets: the experiment's seed must not change them.
FIXED = 0


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
    if data.more and (len(names) > 1 or is_path(names[0])):
        raise UserError(
            f"data.more adds files to one source of data, but data.name = {data.name!r}. Name one file there, or save "
            "each domain in one file."
        )
    if len({*names, *data.more}) < len(names) + len(data.more):
        raise UserError(f"data.more = {data.more} lists a source twice, or data.name = {names[0]!r}. Name each once.")
    check_folder(data_dir)
    domains: list[Domain] = []
    for name in names:
        domains += _own(name, data) if is_path(name) else [_load(name, data, data_root(data_dir))]
    domains = same_classes(domains)
    if data.train_samples or data.test_samples:
        from protofed.data.skew import fewer  # few experiments have less

        domains = [
            fewer(one, data.train_samples, data.test_samples) if one.computed is None else one for one in domains
        ]
    if data.imbalance > 1:
        from protofed.data.skew import long_tailed  # few experiments have one

        domains = [long_tailed(domain, data.imbalance) if domain.computed is None else domain for domain in domains]
    return domains


def check_folder(data_dir: Path | None) -> None:
    """Refuse a data folder that does not exist."""
    if data_dir is not None and not data_dir.is_dir():
        raise UserError(f"{option('data-dir', data_dir)} is not a folder. Name the folder that holds the data sets.")


def _own(name: str, data: Data) -> list[Domain]:
    """The data from a user's function: one data set, or a list or dict of them, one domain each."""
    if data.ids or data.size or data.channels:
        raise UserError(
            f"data.ids, data.size and data.channels are not for {name}, which returns the data as it is used."
        )
    function = imported("data.name", name)
    if not callable(function):
        raise UserError(f"data.name = {name!r} is {type(function).__name__}, not a function that gives data.")
    try:
        given = function(**data.options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"data.name = {name!r}: calling it raises {error_in_words(error)}. Its arguments: data.options."
        ) from error
    if isinstance(given, Computed):
        return [_computed(name, given)]
    several = isinstance(given, list) or (isinstance(given, dict) and "train" not in given)
    from protofed.data.readers.own import read_clients  # only for data in memory

    return read_clients(given if several else {name: given}, test_fraction=data.test_fraction, seed=FIXED).domains


def _computed(name: str, source: Computed) -> Domain:
    """Data whose samples are computed when their client is drawn."""
    sizes = (source.train, source.test)
    if len(source.names) < 1 or any(type(size) is not int for size in sizes) or source.train < 1 or source.test < 0:
        raise UserError(
            f"data.name = {name!r} has {len(source.names)} classes, and {sizes[0]} training and {sizes[1]} test "
            "samples of each client. Give at least one class and one training sample."
        )
    return source.domain(name)


def _gaussians(data: Data) -> Domain:
    """The built-in data that is computed."""
    if data.more or data.ids or data.size or data.channels:
        raise UserError("data.more, data.ids, data.size and data.channels are not for gaussians. See data.options.")
    known = [each.name for each in fields(Gaussians) if each.init]
    for key in data.options:
        if key not in known:
            raise UserError(f"unknown key data.options.{key}. {did_you_mean(key, known)}")
    return _computed("gaussians", Gaussians(**data.options))


def load_own(source: str, data: Data, classes: Sequence[str], data_dir: Path | None = None) -> Domain:
    """One client's own data, its labels numbered by these classes: by name if it has names, otherwise as they are."""
    domain = _load(source, replace(data, ids="", more=[]), data_root(data_dir), names=tuple(classes))
    unknown = [name for name in domain.class_names if name not in classes]
    if unknown:
        raise UserError(
            f"{option('data', source)} has the class {unknown[0]!r}, which is none of {', '.join(classes)}."
        )
    order = np.array([list(classes).index(name) for name in domain.class_names], np.int64)
    return replace(
        domain, y_train=order[domain.y_train], y_test=order[domain.y_test], class_names=tuple(classes),
        scale=_find_scale(source, data_root(data_dir)),
    )  # fmt: skip


def _find_scale(source: str, root: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """Mean and deviation to normalise by, if the file states them."""
    if source in BUILT_IN or source.startswith(("hf:", "torchvision:")):
        return None
    path = _find(source, root)
    return read_scale(path) if kind_of(path) == "npz" else None


def available(data_dir: Path | None) -> list[dict[str, str]]:
    """The built-in sets and the contents of the data folder, as name, kind and path; nothing is loaded."""
    rows = [{"name": name, "kind": "built in", "path": ""} for name in BUILT_IN]
    root = data_root(data_dir)
    try:
        entries = sorted(root.iterdir())
    except OSError:  # no folder: only the built-in sets
        entries = []
    for path in entries:
        if kind := kind_of(path):
            name = path.stem if path.is_file() else path.name
            rows.append({"name": name, "kind": kind, "path": str(path)})
    return rows


def data_root(data_dir: Path | None) -> Path:
    """The data folder: the given one, or $PROTOFED_DATA, or ./data."""
    return data_dir or Path(os.environ.get("PROTOFED_DATA") or "data")


def _load(name: str, data: Data, root: Path, names: tuple[str, ...] = ()) -> Domain:
    """`names`: class names to use if the source has none."""
    if name == "gaussians":
        return _gaussians(data)
    rng = np.random.default_rng(FIXED)  # a held-back test part belongs to the data set, not to a run
    where, found = _found(name, data, root)
    if data.more:
        found = join_parts([(where, found), *(_found(source, data, root) for source in data.more)])
    if names and not found.class_names:
        _refuse_unknown(found, names, where)
        found = replace(found, class_names=names)
    if data.ids:
        found = replace(found, ids=read_ids(_find(data.ids, root), found))
    return as_domain(name, where, found, data, rng)


def _found(name: str, data: Data, root: Path) -> tuple[str, Found]:
    """What a source holds, and where it is."""
    if name.startswith(MEMORY):
        raise UserError(
            "the data of this run was passed in by a script, and is not kept with it. Pass it again, as in "
            "result = federate(models, clients, out=..., resume=True); result.export(DIR, client=0) exports a model."
        )
    if name == "digits":
        return name, _digits()
    if name == "spiral":
        return name, _spiral(data.counts, data.noise)
    if name.startswith("hf:"):
        from protofed.data.readers.hub import from_hub  # needs another library

        return name, from_hub(name.removeprefix("hf:"), root, data.size)
    if name.startswith("torchvision:"):
        from protofed.data.readers.hub import from_torchvision

        return name, from_torchvision(name.removeprefix("torchvision:"), root, data.size)
    path = _find(name, root)
    if kind_of(path) == "hub":
        from protofed.data.readers.hub import from_hub

        return str(path), from_hub(str(path), root, data.size)
    if kind_of(path) == "pfllib":
        from protofed.data.readers.pfllib import read_pfllib  # a client of a federation loads no more than it needs

        return str(path), read_pfllib(path)
    return str(path), read_arrays(path, data.size)


def _refuse_unknown(found: Found, names: tuple[str, ...], where: str) -> None:
    """Refuse labels without names that are not numbers of these classes."""
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
    else:  # another version stores it elsewhere
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
    return Found(((images / 16).astype(np.float32).reshape(-1, 1, 8, 8), labels))


def _spiral(counts: list[int], noise: float) -> Found:
    """FedNH's six arms, section 3.1: points (N, 2). The test part is balanced: the largest count for every class."""
    if not counts or min(counts) < 1 or noise < 0:
        raise UserError(f"spiral needs data.counts of 1 or more and data.noise >= 0, got {counts} and {noise}.")

    def part(index: int, sizes: list[int]) -> Pair:
        points = []
        for k, size in enumerate(sizes):
            along = np.linspace(0, 1, size)  # (i - 1) / (n - 1)
            radius = 1 + 9 * along
            # One generator per class and part: the size of one class does not change the points of the others.
            omega = k / 3 * np.pi * (1 + along) + np.random.default_rng([FIXED, index, k]).normal(0, noise, size)
            points.append(np.stack([radius * np.cos(omega), radius * np.sin(omega)], axis=1))
        return np.concatenate(points).astype(np.float32), np.repeat(np.arange(len(sizes)), sizes)

    return Found(part(0, counts), part(1, [max(counts)] * len(counts)), tuple(str(k) for k in range(len(counts))))


def _find(name: str, root: Path) -> Path:
    """The file or folder of that name in the data folder, with or without .npz; with slashes, a path is tried first."""
    inside = [root / name, *([] if name.endswith(".npz") else [root / f"{name}.npz"])]
    places = list(dict.fromkeys([Path(name), *inside] if Path(name).name != name else [*inside, Path(name)]))
    there = [place for place in places if _exists(place)]
    # A folder that only shares a data set's name (an unrelated ./mnist) does not hide the data set.
    if usable := [place for place in there if kind_of(place)]:
        return usable[0]
    if there:
        raise UserError(
            f"{there[0]} is not a data set that protofed reads. Give a .npz file, a folder of IDX files, of "
            "CLASS/*.png or train/CLASS/*.png images, by Hugging Face's save_to_disk, of LEAF, of NIST SD19 or of "
            "PFLlib (train/I.npz, test/I.npz)."
        )
    known = {row["name"] for row in available(root) if row["kind"] != "ids"}
    looked = ", ".join(map(str, places)) + ("" if root.is_dir() else f" (there is no folder {root})")
    raise UserError(
        f"data.name = {name!r} was not found: looked for {looked}. {did_you_mean(name, known)} "
        f"Put {Path(name).name.removesuffix('.npz')}.npz into {option('data-dir')} or $PROTOFED_DATA, or use hf:NAME "
        "(pip install 'protofed[hub]') or torchvision:NAME (pip install 'protofed[vision]')."
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # the name is too long for a path, or the folder is not readable
        return False
