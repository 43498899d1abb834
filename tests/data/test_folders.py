"""LEAF's and NIST SD19's folders, written into tmp_path as these are published."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from protofed import Experiment
from protofed.data.domain import Domain
from protofed.data.sources import Data, available, load
from protofed.errors import UserError
from protofed.runs.setup import prepare_split

RNG = np.random.default_rng(3)
PEOPLE = {"f0001_10": 25, "f0002_41": 30, "f0003_07": 4}


def one(name: str, root: Path, **options: Any) -> Domain:
    (domain,) = load(Data(name=name, **options), root)
    return domain


def failure(name: str, root: Path) -> str:
    with pytest.raises(UserError) as caught:
        one(name, root)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_leaf(folder: Path, people: dict[str, int], width: int = 784, files: int = 2) -> dict[str, Any]:
    """As LEAF's preprocessing writes them: some users to a file."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        user: {"x": RNG.random((count, width)).round(3).tolist(), "y": (np.arange(count) % 5).tolist()}
        for user, count in people.items()
    }
    for number in range(files):
        part = dict(list(data.items())[number::files])
        content = {"users": list(part), "num_samples": [len(one["y"]) for one in part.values()], "user_data": part}
        (folder / f"all_data_{number}_niid_0_keep_0_train_9.json").write_text(json.dumps(content))
    return data


def test_leaf_has_its_users_as_owners(tmp_path: Path) -> None:
    data = write_leaf(tmp_path / "femnist" / "train", PEOPLE)
    write_leaf(tmp_path / "femnist" / "test", dict.fromkeys(PEOPLE, 5), files=1)
    femnist = one("femnist", tmp_path)
    assert femnist.x_train.shape == (59, 1, 28, 28)
    assert femnist.x_test.shape == (15, 1, 28, 28)
    train, test = femnist.ids["user"]
    assert np.unique(test).tolist() == list(PEOPLE)
    for user, samples in data.items():
        rows = femnist.x_train[train == user]
        assert np.allclose(rows.reshape(len(rows), -1), np.array(samples["x"]))
        assert femnist.y_train[train == user].tolist() == samples["y"]
    plan = Experiment.load("demo", "data=femnist", "partition=natural", "model=cnn_mnist", "clients=2")
    _, split = prepare_split(plan, tmp_path)
    assert [len(rows) for rows in split.train] == [25, 30]
    assert [len(rows) for rows in split.test] == [5, 5]


def test_leaf_without_tests_and_with_rows_of_a_table(tmp_path: Path) -> None:
    write_leaf(tmp_path / "synthetic" / "all_data", {**PEOPLE, "nobody": 0}, width=60)
    synthetic = one("synthetic", tmp_path, test_fraction=0.25)
    assert synthetic.x_train.shape[1:] == (60,)
    assert len(synthetic.x_train) + len(synthetic.x_test) == 59
    assert set(np.concatenate(synthetic.ids["user"])) == set(PEOPLE)


def test_damaged_leaf_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "leaf" / "train" / "part.json"
    file.parent.mkdir(parents=True)
    users: dict[str, Any] = {"a": {"x": [[1.0, 2.0]], "y": [0]}}
    for content, words in {
        '{"users"': "Cannot read",
        "[1]": "is not in LEAF's form",
        '{"user_data": {"a": {"x": []}}}': "is not in LEAF's form",
        json.dumps({"user_data": {"a": {"x": ["a.jpg"], "y": [0]}}}): "user 'a': samples must be lists of numbers",
        json.dumps({"user_data": {"a": {"x": [[1.0], [1.0, 2.0]], "y": [0, 1]}}}): "of one length",
        json.dumps(
            {"user_data": {"a": {"x": [[1.0]], "y": [0, 1]}}}
        ): "labels of shape (2,) for samples of shape (1, 1)",
        json.dumps({"user_data": users | {"b": {"x": [[1.0]], "y": [0]}}}): "samples of 2 shapes",
        json.dumps({"user_data": {}}): "samples of 0 shapes",
    }.items():
        file.write_text(content)
        assert words in failure("leaf", tmp_path)


def write_sd19(folder: Path, ready: bool) -> None:
    """by_class/30/hsf_0/hsf_0_00000.png and so on; train_30 has those of all forms but hsf_4 once more."""
    for number, code in enumerate(("30", "4a", "7a")):
        for form, count in {"hsf_0": 4, "hsf_6": 3, "hsf_4": 2, **({f"train_{code}": 7} if ready else {})}.items():
            (folder / code / form).mkdir(parents=True)
            (folder / code / f"{form}.mit").write_text("who wrote it")
            for i in range(count):
                shade = Image.new("RGB", (16, 16), (60 * number + i,) * 3)
                shade.save(folder / code / form / f"{form}_{i:05}.png")


@pytest.mark.parametrize("ready", [True, False])
def test_sd19_by_class(tmp_path: Path, ready: bool) -> None:
    write_sd19(tmp_path / "femnist" / "by_class", ready)
    femnist = one("femnist", tmp_path, size=8, channels=1)
    assert femnist.class_names == ("0", "J", "z")
    assert femnist.x_train.shape == (21, 1, 8, 8)
    assert np.bincount(femnist.y_train).tolist() == [7, 7, 7]
    assert np.bincount(femnist.y_test).tolist() == [2, 2, 2]
    assert (femnist.x_train[:, 0, 0, 0] // 60 == femnist.y_train).all()
    assert one("femnist/by_class", tmp_path, size=8).class_names == ("0", "J", "z")


def test_they_are_listed_and_told_from_other_folders(tmp_path: Path) -> None:
    write_leaf(tmp_path / "a" / "train", PEOPLE, width=2)
    write_sd19(tmp_path / "b" / "by_class", ready=True)
    (tmp_path / "c" / "30" / "notes").mkdir(parents=True)
    (tmp_path / "d" / "test").mkdir(parents=True)
    (tmp_path / "d" / "test" / "x.json").write_text("{}")
    assert {row["name"]: row["kind"] for row in available(tmp_path) if row["path"]} == {"a": "leaf", "b": "sd19"}
    (tmp_path / "e" / "30" / "hsf_0").mkdir(parents=True)
    assert "holds no images in its folders" in failure("e", tmp_path)


@pytest.mark.parametrize(
    ("user", "y", "said"),
    [
        ("u", 3, r"labels of shape \(\) for samples of shape \(2, 784\)"),
        ("u", [[1], [2]], r"labels of shape \(2, 1\)"),
        ("u" * 5000, [1, 2], "a name of 5,000 characters"),
    ],
)
def test_labels_and_names_that_are_none_are_refused(tmp_path: Path, user: str, y: object, said: str) -> None:
    (tmp_path / "train").mkdir()
    told = {"user_data": {user: {"x": [[0.5] * 784] * 2, "y": y}}}
    (tmp_path / "train" / "a.json").write_text(json.dumps(told))
    with pytest.raises(UserError, match=said):
        one(str(tmp_path), tmp_path)
