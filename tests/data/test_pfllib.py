"""PFLlib's data folders: read as they are, each client with its own samples, and nothing in them is ever run."""

import io
import json
import os
import pickle
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protofed import Experiment, UserError, run
from protofed.data.readers.objects import Strange, plain_objects, read_objects
from protofed.data.readers.pfllib import read_pfllib
from protofed.data.sources import Data, available, load

SIZES = ((9, 3), (30, 10), (4, 2))
G = np.random.default_rng(5)


def samples(many: int, classes: tuple[int, ...]) -> dict[str, np.ndarray]:
    y = np.array([classes[i % len(classes)] for i in range(many)])
    x = G.normal(size=(many, 1, 16, 16)).astype(np.float32) + y[:, None, None, None]
    return {"x": x.astype(np.float32), "y": y}


def save_client(path: Path, data: Any, protocol: int | None = None) -> None:
    """As PFLlib saves one: a dict, which numpy pickles."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if protocol is None:
        np.savez_compressed(path, data=data)
        return
    array = np.empty((), object)
    array[()] = data
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"shape": (), "fortran_order": False, "descr": "|O"})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.npy", header.getvalue() + pickle.dumps(array, protocol))


@pytest.fixture
def folder() -> Path:
    """Three clients with two classes each, of four."""
    place = Path("dataset") / "Shapes"
    for client, (train, test) in enumerate(SIZES):
        classes = (client, client + 1)
        save_client(place / "train" / f"{client}.npz", samples(train, classes))
        save_client(place / "test" / f"{client}.npz", samples(test, classes))
    config = {"num_clients": 3, "num_classes": 5, "non_iid": True, "balance": False, "partition": "pat", "alpha": 0.1}
    (place / "config.json").write_text(json.dumps(config))
    return place


def test_a_folder_is_read_as_it_is(folder: Path) -> None:
    (domain,) = load(Data(name="Shapes", normalize="none"), Path("dataset"))
    assert domain.class_names == ("0", "1", "2", "3", "4")  # also the one that nobody has
    assert {row["name"]: row["kind"] for row in available(Path("dataset"))}["Shapes"] == "pfllib"
    for client in range(3):
        for part, x, y, owners in (
            ("train", domain.x_train, domain.y_train, domain.ids["client"][0]),
            ("test", domain.x_test, domain.y_test, domain.ids["client"][1]),
        ):
            with np.load(folder / part / f"{client}.npz", allow_pickle=True) as file:
                there = file["data"].item()
            assert (x[owners == client] == there["x"]).all()
            assert (y[owners == client] == there["y"]).all()


def test_every_client_trains_and_is_tested_on_its_own_files(folder: Path) -> None:
    keys = ("model=cnn_pfllib", "rounds=1", "clients=3", "data.name=Shapes", "data.normalize=none")
    plan = Experiment.load("demo", *keys, "partition=natural", "partition.key=client", "partition.min_size=2")
    result = run(plan, "out", data_dir=folder.parent)
    assert [(client["train"], client["test"]) for client in result.clients] == list(SIZES)
    assert [client["classes"] for client in result.clients] == [[0, 1], [1, 2], [2, 3]]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_arrays_of_every_form_come_back(protocol: int) -> None:
    whole = np.arange(24, dtype=np.float64).reshape(2, 3, 4)
    given = {
        "plain": whole, "fortran": np.asfortranarray(whole), "cut": whole[:, ::2], "swapped": whole.astype(">i2"),
        "bool": whole > 3, "half": whole.astype(np.float16), "bytes": whole.astype(np.uint8), "empty": whole[:0],
        "numbers": [1, -2, 2**40, 0.5, True, None, "text"], "pair": (1, (2, 3, 4, 5)), 7: {"inner": whole},
    }  # fmt: skip
    if protocol == 2:  # Python 2's bytes are a call of a codec
        with pytest.raises(Strange, match=r"a Python object \(_codecs.encode\)"):
            plain_objects(pickle.dumps(given, protocol))
        return
    found = plain_objects(pickle.dumps(given, protocol))
    assert found.keys() == given.keys()
    for key, value in given.items():
        if isinstance(value, np.ndarray):
            assert found[key].dtype == value.dtype
            assert (found[key] == value).all()
            assert found[key].shape == value.shape
    assert (found["numbers"], found["pair"]) == (given["numbers"], given["pair"])
    assert (found[7]["inner"] == whole).all()
    save_client(Path("one.npz"), {"x": whole, "y": np.arange(2)}, protocol)
    assert (read_objects(Path("one.npz"))["data"]["x"] == whole).all()


class Evil:
    """Would make a file if it were unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made",)


class Own:
    pass


@pytest.mark.parametrize(
    ("thing", "said"),
    [
        (Evil(), r"holds a Python object \(posix.mkdir\), which is not read: nothing in it was run\. Where the file"),
        ({"x": Evil(), "y": 1}, r"\(posix.mkdir\)"),
        (np.array([Evil()], object), r"\(posix.mkdir\)"),
        (Own(), r"a Python object \(.*test_pfllib.Own\)"),
        (np.zeros(2, [("a", "f4")]), "an array of type 'V4'"),
        ({1, 2}, r"a Python object \(instruction EMPTY_SET\)"),
        (np.datetime64("2020-01-01"), "an array of type 'M8'"),
    ],
)
def test_nothing_in_a_file_is_run(thing: Any, said: str) -> None:
    save_client(Path("one.npz"), thing, protocol=4)
    with pytest.raises(UserError, match=said) as caught:
        read_objects(Path("one.npz"))
    assert "\n" not in str(caught.value)
    assert not Path("made").exists()


def test_pickles_made_by_hand_are_bounded() -> None:
    nested: Any = []
    for _ in range(20):
        nested = [nested]
    itself: list[Any] = []
    itself.append(itself)
    for thing in (nested, itself):
        with pytest.raises(Strange, match="more than 8 lists or dicts in each other"):
            plain_objects(pickle.dumps(thing, 4))
    laughs: Any = ["ha"] * 1000
    for _ in range(5):
        laughs = [laughs] * 1000  # 10^18 words, each list once in the pickle
    assert len(plain_objects(pickle.dumps(laughs, 4))) == 1000
    whole = pickle.dumps({"x": np.arange(50.0), "y": [1, 2, 3]}, 4)
    for cut in range(len(whole)):
        with pytest.raises(Strange):
            plain_objects(whole[:cut])
    for place in range(0, len(whole), 3):  # damaged anywhere: read as something else, or refused
        for bit in (1, 64):
            spoilt = bytearray(whole)
            spoilt[place] ^= bit
            try:
                plain_objects(bytes(spoilt))
            except Strange:
                continue


def test_arrays_by_themselves_and_lists_of_labels_are_read_too(folder: Path) -> None:
    data = samples(6, (0, 1))
    np.savez(folder / "train" / "0.npz", x=data["x"], y=data["y"])
    save_client(folder / "train" / "1.npz", {"x": data["x"], "y": data["y"].tolist()})
    found = read_pfllib(folder)
    assert found.train[0].shape == (16, 1, 16, 16)
    assert found.train[1][:12].tolist() == data["y"].tolist() * 2


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("train/1.npz", {"x": np.zeros((2, 1, 16, 16))}, r"1\.npz has no y \(it has: x\)"),
        ("train/1.npz", {"x": np.zeros((2, 1, 16, 16)), "y": np.zeros(3, int)}, "There must be one label for each"),
        (
            "train/1.npz",
            {"x": np.zeros((2, 1, 8, 8)), "y": np.zeros(2, int)},
            r"of shape \(1, 8, 8\), the first client",
        ),
        ("train/1.npz", {"x": [[1, 2], 3], "y": np.zeros(2, int)}, "x is not an array of numbers but list. Where the"),
        ("test/1.npz", None, r"client 1 has no train/1\.npz or no test/1\.npz"),
        ("config.json", '{"num_clients": 4}', r"says num_clients = 4, but train/ has 3 files"),
        ("config.json", '{"num_classes": "ten"}', "num_classes = 'ten' should be a number from 1"),
        ("config.json", "{", r"Cannot read .*config.json"),
        ("test/2.npz", b"PK\x03\x04 cut short", r"Cannot read .*2\.npz"),
    ],
)
def test_a_folder_that_is_not_whole_is_said_in_one_line(folder: Path, file: str, content: Any, said: str) -> None:
    place = folder / file
    if content is None:
        place.unlink()
    elif isinstance(content, str | bytes):
        place.write_bytes(content.encode() if isinstance(content, str) else content)
    else:
        save_client(place, content)
    with pytest.raises(UserError, match=said) as caught:
        load(Data(name=str(folder)), None)
    assert "\n" not in str(caught.value)


def test_marks_in_a_pickle_are_found_without_a_look_at_everything_below() -> None:
    """Each of these tuples is empty; to look through the whole stack for each would take minutes."""
    many = 20_000
    began = time.monotonic()
    assert plain_objects(b"\x80\x04" + b"N" * many + b"(t" * many + b".") == ()
    assert time.monotonic() - began < 5
    with pytest.raises(Strange, match="damaged"):
        plain_objects(b"\x80\x04NNt.")


def test_a_file_that_unpacks_to_too_much_is_not_unpacked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protofed.data.readers.objects.LARGEST", 2000)
    with pytest.raises(UserError, match=r"unpacked it has [\d,]+ bytes, and 2,000 are read at most"):
        read_pfllib(folder)


def test_labels_beyond_64_bits_and_folders_without_a_client_are_refused(folder: Path, tmp_path: Path) -> None:
    save_client(folder / "train" / "1.npz", {"x": np.zeros((2, 1, 16, 16)), "y": [2**70, 1]})
    with pytest.raises(UserError, match="a label is too large"):
        read_pfllib(folder)
    for part in ("train", "test"):
        (tmp_path / "none" / part).mkdir(parents=True)
        save_client(tmp_path / "none" / part / "0a.npz", samples(2, (0, 1)))
    with pytest.raises(UserError, match=r"has no file I\.npz"):
        read_pfllib(tmp_path / "none")
