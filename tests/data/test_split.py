"""The saved split: the same hash everywhere, no damage unseen, and pictures of it for any number of clients."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protofed.data.domain import Domain
from protofed.data.split import Split, data_fingerprint
from protofed.errors import UserError
from protofed.report import pictures
from protofed.report.figures import partition

rows = st.lists(st.integers(0, 40), max_size=12).map(lambda values: np.array(values, dtype=np.int64))
splits = st.lists(st.tuples(st.integers(0, 2), rows, rows), min_size=1, max_size=6).map(
    lambda clients: Split(
        np.array([d for d, _, _ in clients]),
        tuple(train for _, train, _ in clients),
        tuple(test for _, _, test in clients),
        ("a note", "über"),
        "f" * 64,
    )
)


def data(name: str = "toy", train: int = 30, test: int = 10, classes: int = 3) -> Domain:
    x = [np.arange(n, dtype=np.float32).reshape(n, 1) for n in (train, test)]
    y = [(np.arange(n) % classes).astype(np.uint8) for n in (train, test)]
    return Domain(name, x[0], y[0], x[1], y[1], tuple(f"c{i}" for i in range(classes)))


def small() -> Split:
    return Split(
        np.array([0, 1]),
        (np.array([0, 1, 2]), np.array([3])),
        (np.array([4]), np.array([5, 36])),
        ("careful",),
        data_fingerprint([data(), data("other")]),
    )


def same(a: Split, b: Split) -> bool:
    return all(
        (x == y).all() and x.dtype == y.dtype == np.int64
        for x, y in zip((a.domain, *a.train, *a.test), (b.domain, *b.train, *b.test), strict=True)
    )


# --- Hash -------------------------------------------------------------------------------------------------------------


def test_the_hash_does_not_depend_on_the_width_or_the_order_of_bytes() -> None:
    split = small()
    for dtype in (np.int32, np.uint16, ">i8", "<i4"):
        other = Split(
            split.domain.astype(dtype),
            tuple(part.astype(dtype) for part in split.train),
            tuple(part.astype(dtype) for part in split.test),
        )
        assert other.hash == split.hash
    # Written down once: another value here would orphan every split that was ever saved.
    assert split.hash == "40e7254b1249363dd9137955f5e454f57faa8aa5eebfc088967c82785864b8c6"


def test_the_hash_sees_where_a_sample_lies() -> None:
    def make(*parts: list[int]) -> str:
        a, b, c, d = (np.array(part, dtype=np.int64) for part in parts)
        return Split(np.array([0, 0]), (a, b), (c, d)).hash

    variants = [
        make([1, 2], [3], [4], [5]),
        make([1], [2, 3], [4], [5]),
        make([1, 2], [], [3, 4], [5]),
        make([1, 2, 3], [], [4], [5]),
        make([2, 1], [3], [4], [5]),
        make([1, 2], [3], [], [4, 5]),
    ]
    assert len(set(variants)) == len(variants)


def test_the_fingerprint_sees_samples_labels_shapes_and_order() -> None:
    a, b = data("a"), data("b", classes=2)
    assert data_fingerprint([a, b]) == data_fingerprint([data("renamed"), b])
    assert len({data_fingerprint(d) for d in ([a], [b], [a, b], [b, a], [data(train=31)], [data(test=11)])}) == 6
    wider = Domain("a", a.x_train, a.y_train.astype(np.int32), a.x_test, a.y_test, a.class_names)
    assert data_fingerprint([wider]) == data_fingerprint([a]), "not the type of the labels"
    other = Domain("a", a.x_train + 1, a.y_train, a.x_test, a.y_test, a.class_names)
    assert data_fingerprint([other]) != data_fingerprint([a])


# --- Files ------------------------------------------------------------------------------------------------------------


@given(split=splits)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip(split: Split, tmp_path: Path) -> None:
    split.save(tmp_path / "partition.npz")
    again = Split.load(tmp_path / "partition.npz")
    assert same(split, again)
    assert (again.hash, again.notes, again.fingerprint) == (split.hash, split.notes, split.fingerprint)
    assert [path.name for path in tmp_path.iterdir()] == ["partition.npz"], "nothing is left behind"


def test_saving_with_domains_records_their_fingerprint(tmp_path: Path) -> None:
    Split(np.array([0]), (np.array([1]),), (np.array([2]),)).save(tmp_path / "a.npz", [data()])
    Split.load(tmp_path / "a.npz").check([data()], 1)
    with pytest.raises(UserError, match="other data"):
        Split.load(tmp_path / "a.npz").check([data(train=33)], 1)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no split at"):
        Split.load(tmp_path / "none.npz")
    with pytest.raises(UserError, match="There is no split at"):
        Split.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04" + bytes(50), b"\x93NUMPY\x01\x00garbage"])
def test_no_split_at_all(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"cannot be read .*make a new one"):
        Split.load(path)


def test_pickles_and_foreign_arrays_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "pickle.npz", domain=np.array([{"a": 1}], dtype=object))
    np.savez(tmp_path / "foreign.npz", x=np.zeros(3))
    np.save(tmp_path / "single.npy", np.zeros(3))
    for name in ("pickle.npz", "foreign.npz", "single.npy"):
        with pytest.raises(UserError, match="cannot be read"):
            Split.load(tmp_path / name)


def test_truncated_or_flipped_bytes_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "partition.npz"
    small().save(path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for cut in rng.integers(0, len(whole), 30):
        path.write_bytes(whole[:cut])
        with pytest.raises(UserError):
            Split.load(path)
    noticed = 0
    for place in rng.integers(0, len(whole), 200):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            assert same(Split.load(path), small()), "a change may hit a date in the zip, never the split"
        except UserError:
            noticed += 1
    assert noticed > 50


@pytest.mark.parametrize("key", ["domain", "train", "test", "train_offsets", "test_offsets"])
def test_a_changed_split_is_noticed(tmp_path: Path, key: str) -> None:
    path = tmp_path / "partition.npz"
    small().save(path)
    with np.load(path) as stored:
        arrays = dict(stored)
    arrays[key] = arrays[key].copy()
    arrays[key][1 if "offsets" in key else 0] += 1
    np.savez(path, **arrays)
    with pytest.raises(UserError, match="was changed after it was written"):
        Split.load(path)
    arrays["train_offsets"] = np.array([0, 9, 4])
    np.savez(path, **arrays)
    with pytest.raises(UserError, match="cannot be read"):
        Split.load(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "partition.npz"
    small().save(path)
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        Split(np.array([0]), (np.array([1]),), (np.array([2]),)).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


# --- Check, counts, arrays --------------------------------------------------------------------------------------------


def test_check() -> None:
    domains, split = [data(), data("other")], small()
    split.check(domains, 2)
    with pytest.raises(UserError, match=r"has 2 clients, but clients = 3\. Set clients = 2"):
        split.check(domains, 3)
    with pytest.raises(UserError, match="made for other data"):
        split.check([data()], 2)
    one = np.array([0])
    for train, test, told in (
        ([30], [0], "client 0 train rows 30 to 30, but toy has rows 0 to 29"),
        ([-1, 2], [0], "train rows -1 to 2"),
        ([0], [40], "client 0 test rows 40 to 40, but toy has rows 0 to 39"),
    ):
        with pytest.raises(UserError, match=told):
            Split(one, (np.array(train),), (np.array(test),)).check(domains, 1)
    with pytest.raises(UserError, match="client 0 domain 7, but the data has 2"):
        Split(np.array([7]), (one,), (one,)).check(domains, 1)
    with pytest.raises(ValueError, match="one domain, one train part"):
        Split(one, (one, one), (one,))


def test_counts_and_arrays() -> None:
    domains, split = [data(), data("other", classes=2)], small()
    assert split.counts(domains).tolist() == [[1, 1, 1], [0, 1, 0]]
    x_train, y_train, x_test, y_test = split.arrays(domains, 1)
    assert x_train.ravel().tolist() == [3]
    assert y_train.tolist() == [1]
    assert x_test.ravel().tolist() == [5, 26], "row 36 of 10 test samples is train row 26, held back"
    assert y_test.tolist() == [1, 0]


# --- Pictures and numbers ---------------------------------------------------------------------------------------------


def test_describe_is_plain_numbers() -> None:
    told = partition.describe(small(), [data(), data("other")])
    assert json.loads(json.dumps(told)) == told
    assert told["clients"] == 2
    assert told["train"] == {"min": 1, "median": 2.0, "mean": 2.0, "max": 3, "total": 4}
    assert told["test"]["total"] == 3
    assert told["classes_per_client"]["max"] == 3
    assert told["per_class"] == {"c0": 2, "c1": 1, "c2": 1}


@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")  # of files that other tests left open
@pytest.mark.parametrize(
    ("clients", "classes", "domains"),
    [
        (1, 1, 0),
        (2, 2, 0),
        (5, 4, 4),
        (20, 10, 0),
        (60, 60, 0),
        (100, 10, 3),
        (3, 200, 0),
        (1000, 200, 2),
        (10000, 10, 2),
    ],
)
def test_pictures_of_any_size(tmp_path: Path, clients: int, classes: int, domains: int) -> None:
    counts = np.random.default_rng(0).integers(0, 40, (clients, classes)) ** 2
    names = [f"a class with quite a long name {c}" for c in range(classes)]
    of = [f"domain{i % domains}" for i in range(clients)] if domains else None
    path = tmp_path / "partition.png"
    pictures.draw_counts(counts, names, "who has what", path, of)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = (int.from_bytes(content[a : a + 4], "big") for a in (16, 20))
    assert 200 < width < 3000
    assert 150 < height < 3000
    assert list(tmp_path.iterdir()) == [path]


def test_of_very_many_clients_some_of_every_domain_are_shown() -> None:
    colours = ["a", "b", "c", "d", "e"] * 2000  # dealt in turn
    plot, notes = partition.plot_of(np.ones((10_000, 3), dtype=int), ["x", "y", "z"], colours)
    heat, stripe = plot.marks
    assert set(stripe.colours) == set(colours)  # type: ignore[union-attr]
    assert notes == ["400 of 10,000 clients are shown"]
    assert len(stripe.x) == len(heat.columns) == 400  # type: ignore[union-attr]


@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")  # of files that other tests left open
@pytest.mark.parametrize("shape", [(4, 3), (80, 3)])
@pytest.mark.parametrize("value", [0, 1])
def test_pictures_of_next_to_nothing(tmp_path: Path, shape: tuple[int, int], value: int) -> None:
    pictures.draw_counts(np.full(shape, value), ["a", "b", "c"], "little", tmp_path / "partition.png")


def test_bubbles_are_as_large_as_their_counts_and_have_the_colour_of_their_domain() -> None:
    plot, notes = partition.plot_of(np.array([[400, 0], [100, 25]]), ["x", "y"], ["#111111", "#222222"])
    (points,) = plot.marks
    assert [*zip(points.x, points.y, points.colours, strict=True)] == [  # type: ignore[union-attr]
        (0, 0, "#111111"), (1, 0, "#222222"), (1, 1, "#222222"),
    ]  # fmt: skip
    sizes = np.array(points.sizes)  # type: ignore[union-attr]
    np.testing.assert_allclose(sizes**2 / sizes[0] ** 2, [1, 1 / 4, 1 / 16])
    assert notes == ["the largest bubble has 400"]


@pytest.mark.usefixtures("pictures")
def test_draw_split(tmp_path: Path) -> None:
    for domains in ([data(), data("other")], [data()]):
        split = Split(np.arange(2) % len(domains), small().train, small().test)
        pictures.draw_split(split, domains, tmp_path / "partition.png")
        assert (tmp_path / "partition.png").stat().st_size > 1000
