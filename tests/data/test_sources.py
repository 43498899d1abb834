"""Every source of data and every error it can make; files are real ones, written into tmp_path."""

import gzip
import importlib.util
import io
import os
import struct
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkout import ROOT
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier

from protofed.data import sources
from protofed.data.domain import Domain
from protofed.data.readers.inputs import read_inputs
from protofed.data.readers.kinds import read_arrays
from protofed.data.scaling import Scaler, describe_inputs
from protofed.data.sources import Data, available, load
from protofed.data.split import Split
from protofed.errors import UserError

RNG = np.random.default_rng(7)
IMBALANCED = [3000, 1500, 750, 375, 187, 93]


def grey(count: int, side: int = 6) -> np.ndarray:
    return RNG.integers(0, 256, (count, side, side), dtype=np.uint8)


def labels(count: int, classes: int = 3) -> np.ndarray:
    return (np.arange(count) % classes).astype(np.uint8)


def one(name: str, root: Path | None = None, **options: Any) -> Domain:
    (domain,) = load(Data(name=name, **options), root)
    return domain


def failure(name: str | list[str], root: Path | None = None, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(Data(name=name, **options), root)
    message = str(caught.value)
    assert "\n" not in message
    return message


def save(root: Path, name: str = "toy", **arrays: Any) -> Path:
    path = root / f"{name}.npz"
    np.savez(path, **arrays)
    return path


def usual(train: int = 30, test: int = 12, **more: Any) -> dict[str, Any]:
    parts = {"x_train": grey(train), "y_train": labels(train), "x_test": grey(test), "y_test": labels(test)}
    return parts | more


# --- built in ---------------------------------------------------------------------------------------------------------


def test_digits_are_scaled_split_by_class_and_always_the_same() -> None:
    a, b = one("digits"), one("digits")
    assert a.x_train.shape[1:] == (1, 8, 8)
    assert a.x_train.dtype == np.float32
    assert (a.x_train.min(), a.x_train.max()) == (0, 1)
    assert len(a.x_train) + len(a.x_test) == 1797
    assert np.array_equal(a.x_test, b.x_test)
    assert a.class_names == tuple("0123456789")
    share = np.bincount(a.y_test) / (np.bincount(a.y_test) + np.bincount(a.y_train))
    assert np.abs(share - 0.2).max() < 0.01
    half = one("digits", test_fraction=0.5)
    assert abs(len(half.x_test) / 1797 - 0.5) < 0.01


def test_spiral_follows_the_formula_where_there_is_no_noise() -> None:
    spiral = one("spiral", noise=0.0, counts=[5] * 6)
    for k in range(6):
        for i in range(1, 6):
            radius = 1 + (i - 1) * 9 / 4
            omega = k / 3 * np.pi + (i - 1) * k / (3 * 4) * np.pi
            expected = radius * np.cos(omega), radius * np.sin(omega)
            assert np.allclose(spiral.x_train[spiral.y_train == k][i - 1], expected, atol=1e-5)


def test_spiral_is_fixed_and_its_test_part_is_balanced() -> None:
    balanced, imbalanced = one("spiral"), one("spiral", counts=IMBALANCED)
    assert np.bincount(balanced.y_train).tolist() == [3000] * 6
    assert np.bincount(imbalanced.y_train).tolist() == IMBALANCED
    assert np.bincount(imbalanced.y_test).tolist() == [3000] * 6
    assert np.array_equal(balanced.x_test, imbalanced.x_test)
    assert not np.array_equal(balanced.x_train, balanced.x_test)


def test_spiral_can_be_learned_at_the_default_noise_and_not_at_the_printed_one() -> None:
    def score(**options: Any) -> float:
        spiral = one("spiral", **options)
        return KNeighborsClassifier(31).fit(spiral.x_train, spiral.y_train).score(spiral.x_test, spiral.y_test)

    assert score() > 0.92
    assert 0.3 < score(noise=1.0) < 0.4


def test_spiral_refuses_no_samples() -> None:
    assert "data.counts" in failure("spiral", counts=[3, 0])


# --- .npz -------------------------------------------------------------------------------------------------------------


def test_npz_by_path_by_name_and_by_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = usual()
    path = save(tmp_path, **arrays)
    expected = arrays["x_train"][:, None]
    for domain in (one(str(path)), one("toy", tmp_path), one("toy.npz", tmp_path)):
        assert domain.x_train.dtype == np.uint8
        assert np.array_equal(domain.x_train, expected)
        assert np.array_equal(domain.y_test, arrays["y_test"])
    monkeypatch.setenv("PROTOFED_DATA", str(tmp_path))
    assert np.array_equal(one("toy").x_train, expected)
    monkeypatch.delenv("PROTOFED_DATA")
    (tmp_path / "data").mkdir()
    path.rename(tmp_path / "data" / "toy.npz")
    monkeypatch.chdir(tmp_path)
    assert np.array_equal(one("toy").x_train, expected)


def test_a_folder_that_is_no_data_set_does_not_hide_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "store").mkdir()
    save(tmp_path / "store", **usual())
    monkeypatch.chdir(tmp_path)
    assert len(one("toy", Path("store")).x_train) == 30
    for part in ("train", "test"):  # nor does one that is: a name is looked up in the data folder first
        for k in "ab":
            (tmp_path / "toy" / part / k).mkdir(parents=True)
            Image.new("L", (4, 4)).save(tmp_path / "toy" / part / k / "0.png")
    assert len(one("toy", Path("store")).x_train) == 30
    assert len(one("./toy", Path("store")).x_train) == 2


def test_npz_shapes(tmp_path: Path) -> None:
    colour = RNG.integers(0, 256, (30, 5, 6, 3), dtype=np.uint8)
    save(tmp_path, "colour", x_train=colour, y_train=labels(30), x_test=colour[:3], y_test=labels(3))
    got = one("colour", tmp_path).x_train
    assert got.shape == (30, 3, 5, 6)
    assert np.array_equal(got[:, 2], colour[..., 2])
    assert got.flags.c_contiguous
    first = RNG.random((30, 3, 5, 6))
    save(tmp_path, "first", x_train=first, y_train=labels(30), x_test=first[:3], y_test=labels(3))
    got = one("first", tmp_path).x_train
    assert got.dtype == np.float32
    assert np.allclose(got, first)
    counts = RNG.integers(0, 9, (30, 800), dtype=np.uint8)
    save(tmp_path, "counts", x_train=counts, y_train=labels(30), x_test=counts[:3], y_test=labels(3))
    got = one("counts", tmp_path).x_train
    assert got.dtype == np.float32
    assert np.array_equal(got, counts)


def test_npz_without_a_test_part_is_split_by_class_and_always_alike(tmp_path: Path) -> None:
    x, y = np.arange(100.0).reshape(50, 2), np.repeat([0, 1, 2], [40, 9, 1])
    save(tmp_path, x_train=x, y_train=y, writer_train=np.arange(50))
    a, again = one("toy", tmp_path), one("toy", tmp_path)
    assert np.bincount(a.y_test).tolist() == [8, 2]
    assert np.bincount(a.y_train).tolist() == [32, 7, 1]
    assert np.array_equal(a.x_test, again.x_test)
    train, test = a.ids["writer"]
    assert np.array_equal(a.x_train, x[train])
    assert np.array_equal(a.x_test, x[test])
    assert not set(train) & set(test)


def test_every_class_keeps_a_sample_to_train_on(tmp_path: Path) -> None:
    save(tmp_path, x_train=grey(6), y_train=labels(6))
    toy = one("toy", tmp_path, test_fraction=0.9)
    assert sorted(toy.y_train) == sorted(toy.y_test) == [0, 1, 2]


def test_any_labels_become_numbers_from_zero(tmp_path: Path) -> None:
    y = np.array([7, -2, 30, 7, -2, 30])
    save(tmp_path, x_train=grey(6), y_train=y, x_test=grey(2), y_test=np.array([99, 7])[:, None])
    toy = one("toy", tmp_path)
    assert toy.class_names == ("-2", "7", "30", "99")
    assert toy.y_train.tolist() == [1, 0, 2, 1, 0, 2]
    assert toy.y_test.tolist() == [3, 1]


@pytest.mark.parametrize(
    "values, names, expected",
    [([0, 2], ["a", "b", "c"], [0, 2]), ([1, 3], ["a", "b"], [0, 1]), ([0, 1], [b"a", b"b"], [0, 1])],
)
def test_class_names(tmp_path: Path, values: list[int], names: list[Any], expected: list[int]) -> None:
    save(tmp_path, **usual(y_train=np.repeat(values, 15), y_test=np.repeat(values, 6), class_names=np.array(names)))
    toy = one("toy", tmp_path)
    assert toy.class_names == ("a", "b", "c")[: len(names)]
    assert np.unique(toy.y_train).tolist() == expected


def test_missing_values_stay_in_tables_and_nowhere_else(tmp_path: Path) -> None:
    table = np.array([[1.0, np.nan, 5.0], [3.0, np.nan, np.nan], [5.0, np.nan, 7.0]] * 10)
    table[:, 1] = np.nan  # which nobody has measured
    save(tmp_path, **usual(x_train=table, x_test=table[:12]))
    toy = one("toy", tmp_path)
    scale = Scaler.of(toy, "auto")
    assert scale.mean.tolist() == [[3.0, 0.0, 6.0]]
    np.testing.assert_allclose(scale.std, [[np.sqrt(8 / 3), 1.0, 1.0]], rtol=1e-6)
    assert np.array_equal(np.isnan(scale(toy.x_train).numpy()), np.isnan(table))
    told = describe_inputs(toy, "auto")
    assert (told["range"], told["missing"]) == ([1.0, 7.0], True)
    save(tmp_path, **usual(x_train=np.where(np.isnan(table), np.inf, table), x_test=table[:12]))
    assert "infinite" in failure("toy", tmp_path)
    whole = np.nan_to_num(table)
    save(tmp_path, **usual(x_train=whole, x_test=whole[:12]))
    assert "missing" not in describe_inputs(one("toy", tmp_path), "auto")


def test_classes_may_be_named_by_an_array_called_classes(tmp_path: Path) -> None:
    save(tmp_path, **usual(), classes=np.array(["a", "b", "c", "d"]))
    assert one("toy", tmp_path).class_names == ("a", "b", "c", "d")
    for other in (np.array(["a", "b"]), np.arange(3), np.array([["a"], ["b"], ["c"]])):  # something else
        save(tmp_path, **usual(), classes=other)
        assert one("toy", tmp_path).class_names == ("0", "1", "2")


def test_natural_owners(tmp_path: Path) -> None:
    owners: dict[str, Any] = {"writer_train": np.arange(30), "writer_test": np.arange(12), "short_train": np.arange(3)}
    save(tmp_path, **usual(), **owners, short_test=np.arange(3), alone_train=np.arange(30))
    toy = one("toy", tmp_path)
    assert list(toy.ids) == ["writer"]
    assert np.array_equal(toy.ids["writer"][1], np.arange(12))
    save(tmp_path, "side", town_train=np.full(30, "x"), town_test=np.full(12, "y"))
    toy = one("toy", tmp_path, ids="side")
    assert list(toy.ids) == ["town"]
    assert toy.ids["town"][0].shape == (30,)


def test_owners_of_samples_without_a_test_part_need_no_suffix(tmp_path: Path) -> None:
    known = usual()
    short = {"x": known["x_train"], "y": known["y_train"], "ward": np.arange(30), "beds": np.arange(4)}
    save(tmp_path, **short, mean=np.zeros(30))
    toy = one("toy", tmp_path)
    assert list(toy.ids) == ["ward"]
    assert sorted(np.concatenate(toy.ids["ward"])) == list(range(30))
    save(tmp_path, **usual(), ward=np.arange(30))  # of a file with a test part this may be anything
    assert not one("toy", tmp_path).ids


def test_a_side_table_goes_along_when_the_data_is_split(tmp_path: Path) -> None:
    side = save(tmp_path, "side", row_train=np.arange(1797))
    digits = one("digits", ids=str(side))
    both = np.concatenate(digits.ids["row"])
    assert sorted(both) == list(range(1797))
    assert len(digits.ids["row"][1]) == len(digits.y_test)


def test_a_wrong_side_table_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, **usual())
    save(tmp_path, "long", writer_train=np.arange(31), writer_test=np.arange(12))
    assert "30 train samples" in failure("toy", tmp_path, ids="long")
    save(tmp_path, "half", writer_train=np.arange(30))
    assert "no such array" in failure("toy", tmp_path, ids="half")
    assert "holds no ids" in failure("toy", tmp_path, ids="toy")
    assert "nowhere" in failure("toy", tmp_path, ids="nowhere")
    save(tmp_path, "other", **usual())
    assert "row for row with one" in failure(["toy", "other"], tmp_path, ids="long")


def test_files_of_one_data_set_are_put_behind_each_other(tmp_path: Path) -> None:
    parts = [usual(x_train=grey(30) + k, x_test=grey(12) + 10 * k) for k in range(3)]
    for k, part in enumerate(parts):
        owners = {"writer_train": np.full(30, k), "writer_test": np.full(12, 10 * k)}
        save(tmp_path, f"part{k}", **part, **owners)
    whole = one("part0", tmp_path, more=["part1", "part2"])
    assert whole.name == "part0"
    for name in ("train", "test"):
        x, y = getattr(whole, f"x_{name}"), getattr(whole, f"y_{name}")
        assert np.array_equal(x[:, 0], np.concatenate([part[f"x_{name}"] for part in parts]))
        assert np.array_equal(y, np.concatenate([part[f"y_{name}"] for part in parts]))
    assert whole.ids["writer"][0].tolist() == [0] * 30 + [1] * 30 + [2] * 30
    assert whole.ids["writer"][1].tolist() == [0] * 12 + [10] * 12 + [20] * 12


def test_files_without_a_test_part_are_split_as_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path, name, x=grey(30), y=labels(30))
    whole = one("a", tmp_path, more=["b"])
    assert (len(whole.y_train), len(whole.y_test)) == (48, 12)


def test_a_side_table_goes_row_for_row_with_all_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path, name, **usual())
    save(tmp_path, "side", writer_train=np.arange(60), writer_test=np.arange(24))
    assert one("a", tmp_path, more=["b"], ids="side").ids["writer"][0].tolist() == list(range(60))


OTHER_FORMS: dict[str, dict[str, Any]] = {
    "training samples are uint8 of shape (5, 5)": {"x_train": grey(30, 5)},
    "training samples are float32": {"x_train": grey(30).astype(np.float32)},
    "test samples are none": {"x_test": None, "y_test": None},
    "classes are a, b, c": {"class_names": np.array(["a", "b", "c"])},
    "owner columns are writer": {"writer_train": np.arange(30), "writer_test": np.arange(12)},
}


@pytest.mark.parametrize("words", OTHER_FORMS)
def test_files_of_another_form_are_refused(tmp_path: Path, words: str) -> None:
    save(tmp_path, "one", **usual())
    save(tmp_path, "two", **{k: v for k, v in (usual() | OTHER_FORMS[words]).items() if v is not None})
    message = failure("one", tmp_path, more=["two"])
    assert "data.more" in message
    assert words in message
    assert "two.npz" in message


def test_more_is_for_one_source_and_names_each_once(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save(tmp_path, name, **usual())
    assert "twice" in failure("one", tmp_path, more=["one"])
    assert "twice" in failure("one", tmp_path, more=["two", "two"])
    assert "one source" in failure(["one", "two"], tmp_path, more=["two"])
    assert "looked for" in failure("one", tmp_path, more=["three"])


BAD_ARRAYS: dict[str, dict[str, Any]] = {
    "x_train": {"x_train": None},
    "y_train": {"y_train": None},
    "y_test": {"y_test": None},
    "30 samples and 29 labels": {"y_train": labels(29)},
    "0 samples": {"x_train": grey(0), "y_train": labels(0)},
    "whole number": {"y_train": labels(30) + 0.5},
    "float64 of shape (30, 3)": {"y_train": np.eye(3)[labels(30)]},
    "NaN": {"x_train": np.full((30, 6, 6), np.nan)},
    "infinite": {"x_train": np.full((30, 6, 6), 1e300)},
    "<U1": {"x_train": np.full((30, 2), "a")},
    "shape (30,)": {"x_train": np.arange(30)},
    "shape (30, 0)": {"x_train": np.zeros((30, 0))},
    "(1, 6, 6), test samples (1, 5, 5)": {"x_test": grey(12, 5)},
    "Python objects": {"x_train": np.array([{}] * 30, dtype=object)},
    "2 class names": {"class_names": np.array(["a", "b"])},
    "repeats": {"class_names": np.array(["a", "a", "b"])},
    "1 samples": {"x_train": np.float64(3)},
}


@pytest.mark.parametrize("words", BAD_ARRAYS)
def test_npz_with_wrong_arrays(tmp_path: Path, words: str) -> None:
    arrays = {name: value for name, value in (usual() | BAD_ARRAYS[words]).items() if value is not None}
    path = save(tmp_path, **arrays)
    message = failure("toy", tmp_path)
    assert words in message
    assert str(path) in message


def test_one_sample_per_class_cannot_be_split(tmp_path: Path) -> None:
    save(tmp_path, x_train=grey(3), y_train=labels(3))
    assert "no class with two samples" in failure("toy", tmp_path)


def test_an_archive_larger_than_the_memory_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten megabytes of zeros are ten kilobytes in a file; a file of somebody else's may have a terabyte of them."""
    np.savez_compressed(tmp_path / "toy.npz", x_train=np.zeros((100, 100_000), np.uint8), y_train=labels(100))
    assert (tmp_path / "toy.npz").stat().st_size < 20_000
    monkeypatch.setattr(os, "sysconf", lambda name: 2000)  # pages of so many bytes
    for read in (
        lambda: read_arrays(tmp_path / "toy.npz", 28),
        lambda: read_inputs(tmp_path / "toy.npz", (100_000,)),
        lambda: Split.load(tmp_path / "toy.npz"),
    ):
        with pytest.raises(UserError, match=r"10,000,.* bytes unpacked, and this machine a memory of 4,000,000"):
            read()


def archive(compression: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as out:
        for name, value in usual().items():
            member = io.BytesIO()
            np.save(member, value)
            out.writestr(f"{name}.npy", member.getvalue())
    return buffer.getvalue()


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "cut": lambda raw: raw[: len(raw) // 2],
    "text": lambda raw: b"hello, this is no archive",
    "start overwritten": lambda raw: raw[:41] + b"\xff" * 20 + raw[61:],
    "overwritten": lambda raw: raw[:300] + b"\xff" * 40 + raw[340:],
}


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_npz(tmp_path: Path, compression: int, damage: str) -> None:
    raw = archive(compression)
    path = tmp_path / "toy.npz"
    path.write_bytes(raw)
    assert len(one("toy", tmp_path).x_train) == 30
    path.write_bytes(DAMAGE[damage](raw))
    message = failure("toy", tmp_path)
    assert str(path) in message
    assert "again" in message


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_missing_name_says_where_it_looked_and_what_there_is(tmp_path: Path) -> None:
    save(tmp_path, "fashion", **usual())
    message = failure("fashoin", tmp_path)
    expected = [str(tmp_path / "fashoin"), "fashoin.npz", "'fashion'", "--data-dir", "PROTOFED_DATA", "hf:NAME"]
    for words in [*expected, "protofed[hub]", "torchvision:NAME", "protofed[vision]"]:
        assert words in message
    assert "digits, fashion, gaussians, spiral" in failure("zzzz", tmp_path)
    assert "gone is not a folder" in failure("zzzz", tmp_path / "gone")
    assert "was not found" in failure("n" * 5000, tmp_path)


def test_names_that_cannot_be(tmp_path: Path) -> None:
    assert "empty" in failure("")
    assert "empty" in failure([])
    assert "empty" in failure("hf:")
    assert "twice" in failure(["digits", "digits"])
    (tmp_path / "table.csv").write_text("1,2\n")
    assert "not a data set that protofed reads" in failure("table.csv", tmp_path)
    (tmp_path / "void").mkdir()
    assert "not a data set that protofed reads" in failure("void", tmp_path)


def test_available_lists_without_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, **usual())
    save(tmp_path, "writers", writer_train=np.arange(3))
    (tmp_path / "cut.npz").write_bytes(b"PK")
    (tmp_path / "note.txt").write_text("no data")
    (tmp_path / "empty").mkdir()
    write_idx(tmp_path / "numbers")
    write_images(tmp_path / "pictures")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(np, "load", refuse)
    monkeypatch.setattr(Image, "open", refuse)
    rows = {row["name"]: row["kind"] for row in available(tmp_path)}
    files = {"toy": "npz", "writers": "ids", "cut": "npz", "numbers": "idx", "pictures": "images", "saved": "hub"}
    assert rows == dict.fromkeys(("digits", "spiral", "gaussians"), "built in") | files
    assert {row["name"]: row["path"] for row in available(tmp_path)}["toy"] == str(tmp_path / "toy.npz")
    assert [row["name"] for row in available(tmp_path / "gone")] == ["digits", "spiral", "gaussians"]


# --- IDX --------------------------------------------------------------------------------------------------------------


def idx(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def write_idx(folder: Path, dash: str = "-", packed: bool = False, test: bool = True) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {"train-images": grey(30), "train-labels": labels(30)}
    if test:
        arrays |= {"t10k-images": grey(9), "t10k-labels": labels(9)}
    for name, values in arrays.items():
        path = folder / f"{name}{dash}idx{values.ndim}-ubyte{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(idx(values)) if packed else idx(values))
    return arrays


@pytest.mark.parametrize("dash", ["-", "."])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("inner", ["", "raw"])
def test_idx_folder(tmp_path: Path, dash: str, packed: bool, inner: str) -> None:
    arrays = write_idx(tmp_path / "numbers" / inner, dash, packed)
    numbers = one("numbers", tmp_path)
    assert np.array_equal(numbers.x_train, arrays["train-images"][:, None])
    assert np.array_equal(numbers.x_test, arrays["t10k-images"][:, None])
    assert np.array_equal(numbers.y_test, arrays["t10k-labels"])
    assert numbers.x_train.dtype == np.uint8


def test_idx_folder_without_a_test_part(tmp_path: Path) -> None:
    write_idx(tmp_path / "numbers", test=False)
    numbers = one("numbers", tmp_path)
    assert np.bincount(numbers.y_test).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "raw, words",
    [
        (b"", "starts with nothing"),
        (b"\x89PNG and more", "starts with 89504e47"),
        (idx(grey(30))[:7], "inside its header"),
        (idx(grey(30))[:-1], "promises (30, 6, 6)"),
        (idx(grey(30)) + b"\0", "promises (30, 6, 6)"),
        (idx(grey(29)), "29 samples and 30 labels"),
    ],
)
def test_damaged_idx(tmp_path: Path, raw: bytes, words: str) -> None:
    write_idx(tmp_path / "numbers")
    (tmp_path / "numbers" / "train-images-idx3-ubyte").write_bytes(raw)
    message = failure("numbers", tmp_path)
    assert words in message
    assert str(tmp_path / "numbers") in message


def test_damaged_or_missing_idx_archive(tmp_path: Path) -> None:
    write_idx(tmp_path / "numbers", packed=True)
    path = tmp_path / "numbers" / "t10k-labels-idx1-ubyte.gz"
    raw = path.read_bytes()
    for broken in (raw[:15], b"plain text", raw[:12] + b"\xff\xff" + raw[14:]):
        path.write_bytes(broken)
        assert path.name in failure("numbers", tmp_path)
    path.unlink()
    assert "no t10k-labels" in failure("numbers", tmp_path)


# --- image folders ----------------------------------------------------------------------------------------------------


def write_images(
    folder: Path, classes: tuple[str, ...] = ("cat", "dog"), count: int = 5, mode: str = "RGB", side: int = 4
) -> None:
    for k, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            colour: Any = 10 * k + i if mode == "L" else (10 * k + i, 100, 200)
            Image.new(mode, (side, side + 1), colour).save(folder / name / f"{i:02}.png")


def test_image_folder_with_train_and_test(tmp_path: Path) -> None:
    write_images(tmp_path / "pets" / "train")
    write_images(tmp_path / "pets" / "test", ("dog",), 2)
    (tmp_path / "pets" / "train" / ".cache").mkdir()
    (tmp_path / "pets" / "train" / "cat" / "notes.txt").write_text("not an image")
    pets = one("pets", tmp_path)
    assert pets.class_names == ("cat", "dog")
    assert pets.x_train.shape == (10, 3, 5, 4)
    assert pets.x_train.dtype == np.uint8
    assert pets.x_train[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    assert (pets.x_train[:, 2] == 200).all()
    assert pets.y_train.tolist() == [0] * 5 + [1] * 5
    assert pets.y_test.tolist() == [1, 1]


def test_image_folder_of_classes_is_split(tmp_path: Path) -> None:
    write_images(tmp_path / "pets", mode="L")
    pets = one(str(tmp_path / "pets"))
    assert pets.x_train.shape == (8, 1, 5, 4)
    assert sorted(pets.y_test) == [0, 1]


def test_grey_images_among_coloured_ones_become_coloured(tmp_path: Path) -> None:
    write_images(tmp_path / "pets", ("cat",), mode="L")
    write_images(tmp_path / "pets", ("dog",))
    write_images(tmp_path / "pets", ("owl",), mode="RGBA")
    pets = one("pets", tmp_path)
    assert pets.shape == (3, 5, 4)
    cats = pets.x_train[pets.y_train == 0]
    assert (cats[:, 0] == cats[:, 2]).all()


def test_sixteen_bit_images_are_scaled_not_clipped(tmp_path: Path) -> None:
    (tmp_path / "scans" / "a").mkdir(parents=True)
    for i in range(4):
        Image.fromarray(np.full((4, 4), 256 * (40 + i), np.uint16)).save(tmp_path / "scans" / "a" / f"{i}.png")
    scans = one("scans", tmp_path)
    assert sorted(np.concatenate([scans.x_train, scans.x_test])[:, 0, 0, 0]) == [40, 41, 42, 43]


def test_images_of_different_sizes(tmp_path: Path) -> None:
    write_images(tmp_path / "pets", ("cat",))
    write_images(tmp_path / "pets", ("dog",), side=9)
    message = failure("pets", tmp_path)
    assert "data.size" in message
    assert "9x10" in message
    pets = one("pets", tmp_path, size=6)
    assert pets.shape == (3, 6, 6)
    assert (pets.x_train[:, 1] == 100).all()


def test_broken_image_folders(tmp_path: Path) -> None:
    write_images(tmp_path / "pets" / "train")
    write_images(tmp_path / "pets" / "val", ("images",))
    assert "'images'" in failure("pets", tmp_path)
    (tmp_path / "pets" / "val").rename(tmp_path / "elsewhere")
    picture = tmp_path / "pets" / "train" / "dog" / "00.png"
    whole = picture.read_bytes()
    for broken in (b"", b"no picture", whole[: whole.index(b"IDAT") + 6]):
        picture.write_bytes(broken)
        assert str(picture) in failure("pets", tmp_path)
    picture.write_bytes(whole)
    (tmp_path / "pets" / "train" / "owl").mkdir()
    assert "owl holds no images" in failure("pets", tmp_path)
    (tmp_path / "pets" / "train" / "owl").rmdir()
    (tmp_path / "pets" / "test").mkdir()
    assert "no class folders" in failure("pets", tmp_path)
    Image.new("F", (4, 5)).save(picture.with_suffix(".tif"))
    (tmp_path / "pets" / "test").rmdir()
    assert "floating-point" in failure("pets", tmp_path)


# --- changing images --------------------------------------------------------------------------------------------------


def test_resizing_and_channels(tmp_path: Path) -> None:
    flat = np.empty((30, 8, 8, 3), np.uint8)
    flat[:] = np.array([200, 101, 50])  # grey 124.79: rounded, not cut off
    save(tmp_path, x_train=flat, y_train=labels(30), x_test=grey(6, 4), y_test=labels(6))
    toy = one("toy", tmp_path, size=5, channels=1)
    assert toy.x_train.shape == (30, 1, 5, 5)
    assert toy.x_test.shape == (6, 1, 5, 5)
    assert toy.x_train.dtype == np.uint8
    assert (toy.x_train == 125).all()
    toy = one("toy", tmp_path, size=8, channels=3)
    assert np.array_equal(toy.x_train, flat.transpose(0, 3, 1, 2))
    assert np.array_equal(toy.x_test[:, 0], toy.x_test[:, 2])


def test_resizing_agrees_with_pillow_over_many_pieces(tmp_path: Path) -> None:
    x = grey(2100, 12)
    save(tmp_path, x_train=x, y_train=labels(2100), x_test=x[:3], y_test=labels(3))
    got = one("toy", tmp_path, size=7).x_train[:, 0].astype(int)
    for i in (0, 1023, 1024, 2099):
        expected = np.asarray(Image.fromarray(x[i]).resize((7, 7), Image.Resampling.BILINEAR)).astype(int)
        assert np.abs(got[i] - expected).max() <= 1


def test_float_images_stay_float_when_resized() -> None:
    digits = one("digits", size=16, channels=3)
    assert digits.x_train.dtype == np.float32
    assert digits.shape == (3, 16, 16)
    assert digits.x_train.max() <= 1


def test_only_images_can_be_resized() -> None:
    assert "for images" in failure("spiral", size=8)
    assert "for images" in failure("spiral", channels=3)


# --- several domains --------------------------------------------------------------------------------------------------


def test_domains_share_one_order_of_classes(tmp_path: Path) -> None:
    y = np.array([0, 1, 2] * 4)
    x = (np.arange(12) % 3).astype(np.float32)[:, None]  # what the sample is, whatever its label
    parts = {"x_train": x, "x_test": x, "y_train": y, "y_test": y}
    turned = {"x_train": x, "x_test": x, "y_train": (y + 1) % 3, "y_test": (y + 1) % 3}
    save(tmp_path, "plain", **parts)
    save(tmp_path, "named", **parts, class_names=np.array(["a", "b", "c"]))
    save(tmp_path, "turned", **turned, class_names=np.array(["c", "a", "b"]))
    domains = load(Data(name=["plain", "named", "turned"]), tmp_path)
    assert [domain.name for domain in domains] == ["plain", "named", "turned"]
    for domain in domains:
        assert domain.class_names == ("a", "b", "c")
        assert domain.y_train.tolist() == x[:, 0].tolist()
        assert domain.y_test.tolist() == x[:, 0].tolist()


def test_domains_of_other_classes_are_an_error(tmp_path: Path) -> None:
    save(tmp_path, "three", **usual())
    save(tmp_path, "four", **usual(y_train=labels(30, 4), y_test=labels(12, 4)))
    save(tmp_path, "pets", **usual(class_names=np.array(["cat", "dog", "owl"])))
    save(tmp_path, "cars", **usual(class_names=np.array(["bus", "van", "cab"])))
    save(tmp_path, "shifted", **usual(y_train=labels(30) + 1, y_test=labels(12) + 1))
    message = failure(["three", "four"], tmp_path)
    assert "three has 3" in message
    assert "four has 4" in message
    assert "cat, dog, owl" in failure(["pets", "cars"], tmp_path)
    assert "1, 2, 3" in failure(["pets", "shifted"], tmp_path)


# --- Hugging Face -----------------------------------------------------------------------------------------------------


@pytest.fixture
def hub() -> Any:
    return pytest.importorskip("datasets", reason="needs the extra hub: pip install 'protofed[hub]'")


def pictures(hub: Any, count: int, shade: int = 0) -> Any:
    features = hub.Features(
        {
            "picture": hub.Image(),
            "coarse": hub.ClassLabel(names=["pet", "wild"]),
            "label": hub.ClassLabel(names=["cat", "dog", "owl"]),
            "owner": hub.Value("string"),
        }
    )
    columns = {
        "picture": [Image.new("L", (4, 5), shade + i) for i in range(count)],
        "coarse": [i % 2 for i in range(count)],
        "label": [i % 3 for i in range(count)],
        "owner": [f"o{i}" for i in range(count)],
    }
    return hub.Dataset.from_dict(columns, features=features)


def test_hub_folder_of_images(tmp_path: Path, hub: Any) -> None:
    parts = hub.DatasetDict(train=pictures(hub, 12), validation=pictures(hub, 3), test=pictures(hub, 6, shade=100))
    parts.save_to_disk(tmp_path / "saved")
    for name, root in (("saved", tmp_path), ("hf:saved", tmp_path), (f"hf:{tmp_path / 'saved'}", None)):
        saved = one(name, root)
        assert saved.class_names == ("cat", "dog", "owl")
        assert saved.x_train.shape == (12, 1, 5, 4)
        assert saved.x_train.dtype == np.uint8
        assert saved.x_train[:, 0, 0, 0].tolist() == list(range(12))
        assert saved.x_test[:, 0, 0, 0].tolist() == list(range(100, 106))
        assert saved.y_train.tolist() == [i % 3 for i in range(12)]
        assert saved.ids["owner"][1].tolist() == [f"o{i}" for i in range(6)]
        assert saved.ids["coarse"][0].tolist() == [i % 2 for i in range(12)]


def test_hub_folder_with_one_part_is_split(tmp_path: Path, hub: Any) -> None:
    pictures(hub, 15).save_to_disk(tmp_path / "saved")
    saved = one("saved", tmp_path)
    assert np.bincount(saved.y_test).tolist() == [1, 1, 1]
    assert len(saved.ids["owner"][0]) == 12


def test_hub_features_and_hidden_test_labels(tmp_path: Path, hub: Any) -> None:
    def numbers(count: int, label: int | None = None) -> Any:
        rows = [[i + 0.5, 2.0] for i in range(count)]
        return hub.Dataset.from_dict({"f": rows, "y": [i % 2 if label is None else label for i in range(count)]})

    parts = hub.DatasetDict(train=numbers(8), test=numbers(5, label=-1), validation=numbers(4))
    parts.save_to_disk(tmp_path / "saved")
    saved = one("saved", tmp_path)
    assert saved.x_train.tolist() == [[i + 0.5, 2.0] for i in range(8)]
    assert saved.x_train.dtype == np.float32
    assert len(saved.x_test) == 4
    assert saved.class_names == ("0", "1")


def test_hub_reads_other_local_folders(tmp_path: Path, hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "table").mkdir()
    hub.Dataset.from_dict({"f": [[1.0, 2.0]] * 10, "label": [0, 1] * 5}).to_parquet(
        tmp_path / "table" / "train.parquet"
    )
    assert len(one(f"hf:{tmp_path / 'table'}").x_train) == 8


def test_hub_errors(tmp_path: Path, hub: Any) -> None:
    hub.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}).save_to_disk(tmp_path / "text")
    assert "text (Value)" in failure("text", tmp_path)
    hub.Dataset.from_dict({"f": [[1.0], [2.0]], "age": [0, 1]}).save_to_disk(tmp_path / "unlabelled")
    assert "label column" in failure("unlabelled", tmp_path)
    hub.Dataset.from_dict({"f": [[1.0], [2.0, 3.0]], "label": [0, 1]}).save_to_disk(tmp_path / "ragged")
    assert "one size" in failure("ragged", tmp_path)
    hub.DatasetDict(a=pictures(hub, 3), b=pictures(hub, 3)).save_to_disk(tmp_path / "parts")
    assert "none is called train" in failure("parts", tmp_path)
    broken = pictures(hub, 3)
    broken.save_to_disk(tmp_path / "cut")
    arrow = next((tmp_path / "cut").glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:100])
    assert "Cannot load" in failure("cut", tmp_path)
    (tmp_path / "cut" / "state.json").write_text("{")
    assert "Cannot load" in failure("cut", tmp_path)
    assert "Cannot load hf:" in failure(f"hf:{tmp_path / 'nowhere'}")


def test_hub_without_a_network(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str) -> None:
        raise ConnectionError(f"Couldn't reach '{name}' on the Hub\n(LocalEntryNotFoundError)")

    monkeypatch.setattr(hub, "load_dataset", offline)
    message = failure("hf:someone/something")
    assert "Couldn't reach 'someone/something'" in message
    assert "save_to_disk" in message


def test_hub_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'protofed[hub]'" in failure("hf:mnist")


# --- torchvision ------------------------------------------------------------------------------------------------------


class Older:
    """The interface of torchvision's MNIST and CIFAR10: train=..., .data, .targets."""

    classes = ("ant", "bee", "fly")

    def __init__(self, root: str, train: bool = True, download: bool = False) -> None:
        if not (Path(root) / "older").exists():
            raise RuntimeError("Dataset not found. You can use download=True to download it")
        self.data = np.full((30 if train else 9, 6, 6, 3), 7, np.uint8)
        self.targets = labels(len(self.data)).tolist()

    def __getitem__(self, i: int) -> tuple[Any, int]:
        raise AssertionError("one by one, though .data is there")

    def __len__(self) -> int:
        return len(self.data)


class Newer:
    """The interface of torchvision's newer sets: split=..., images one by one."""

    def __init__(self, root: str, split: str = "train", download: bool = False) -> None:
        self.count = {"train": 12, "test": 6}[split]

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return Image.new("L", (4, 4), i), i % 3

    def __len__(self) -> int:
        return self.count


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    package, module = types.ModuleType("torchvision"), types.ModuleType("torchvision.datasets")
    vars(module).update(Older=Older, Newer=Newer)
    vars(package).update(datasets=module)
    monkeypatch.setitem(sys.modules, "torchvision", package)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", module)


@pytest.mark.usefixtures("stand_in")
def test_torchvision_interfaces(tmp_path: Path) -> None:
    (tmp_path / "older").mkdir()
    older = one("torchvision:Older", tmp_path)
    assert older.x_train.shape == (30, 3, 6, 6)
    assert len(older.x_test) == 9
    assert older.class_names == ("ant", "bee", "fly")
    newer = one("torchvision:Newer", tmp_path)
    assert newer.x_train[:, 0, 0, 0].tolist() == list(range(12))
    assert newer.y_test.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.usefixtures("stand_in")
def test_torchvision_errors(tmp_path: Path) -> None:
    message = failure("torchvision:Older", tmp_path)
    assert f"D.Older({str(tmp_path)!r}, train=False, download=True)" in message
    assert "Did you mean 'Newer'?" in failure("torchvision:Never")


def test_torchvision_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert "pip install 'protofed[vision]'" in failure("torchvision:MNIST")


def test_real_torchvision(tmp_path: Path) -> None:
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("needs the extra vision: pip install 'protofed[vision]'")
    message = failure("torchvision:MNIST", tmp_path)
    assert "download=True" in message
    write_idx(tmp_path / "MNIST" / "raw")
    assert one("torchvision:MNIST", tmp_path).x_train.shape == (30, 1, 6, 6)


# --- real files -------------------------------------------------------------------------------------------------------


@pytest.fixture
def real() -> Path:
    root = Path(os.environ.get("PROTOFED_DATA") or ROOT.parent / "shared" / "data")
    if not (root / "mnist.npz").is_file():
        pytest.skip("needs real data: set PROTOFED_DATA to a folder with mnist.npz, mnist_writers.npz and usps.npz")
    return root


def test_real_mnist_with_its_writers(real: Path) -> None:
    mnist = one("mnist", real, ids="mnist_writers")
    assert mnist.x_train.shape == (60000, 1, 28, 28)
    assert mnist.x_train.dtype == np.uint8
    assert len(mnist.y_test) == 10000
    assert set(mnist.ids) == {"writer", "series"}
    assert len(np.unique(mnist.ids["writer"][0])) == 539
    assert not set(mnist.ids["writer"][0]) & set(mnist.ids["writer"][1])
    assert "7291 train samples" in failure("usps", real, ids="mnist_writers")


def test_real_domains_of_different_sizes(real: Path) -> None:
    usps, photo = one("usps", real), failure(["usps", "pacs32_photo"], real)
    assert usps.shape == (1, 16, 16)
    assert np.bincount(usps.y_train)[:3].tolist() == [1194, 1005, 731]
    assert "usps has 10" in photo
    both = load(Data(name=["usps", "svhn"], size=20, channels=3), real)
    assert [domain.shape for domain in both] == [(3, 20, 20)] * 2
    assert both[0].x_train.dtype == np.uint8
    kinds = {row["name"]: row["kind"] for row in available(real)}
    assert kinds["mnist"] == "npz"
    assert kinds["mnist_writers"] == "ids"


def test_data_is_an_experiment_section() -> None:
    from pydantic import TypeAdapter, ValidationError

    check = TypeAdapter(sources.Data)
    assert check.validate_python({"name": ["a", "b"], "counts": IMBALANCED}).counts == IMBALANCED
    mistakes: list[dict[str, Any]] = [{"test_fraction": 1.0}, {"size": -1}, {"channels": 2}, {"augment": ["spin"]}]
    for wrong in [*mistakes, {"counts": []}, {"noise": -1.0}]:
        with pytest.raises(ValidationError):
            check.validate_python(wrong)


def test_a_name_in_capitals_is_said_as_it_is_written(tmp_path: Path) -> None:
    np.savez(tmp_path / "toy.npz", X=np.zeros((4, 2)), y=np.arange(4) % 2)
    assert "(it has: X, y). Names are in small letters: x, not X. Save x_train" in failure("toy", tmp_path)
    np.savez(tmp_path / "toy.npz", x=np.zeros((4, 2)))
    assert "toy.npz has no y (it has: x)" in failure("toy", tmp_path)
