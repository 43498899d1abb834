"""The suite of natural federations on real data: who is a client, and that its model takes the samples."""

from pathlib import Path

import numpy as np
import pytest
import torch

from protofed import Experiment
from protofed.config.files import shipped_experiments
from protofed.errors import UserError
from protofed.runs.setup import prepare, prepare_split

SUITE = [name for name in shipped_experiments() if name.startswith("natural/")]
SMALL = {
    "natural/heart_disease": ("heart_disease4", [227, 221, 92, 150]),
    "natural/spoken_digits6": ("fsdd", [50] * 6),
    "natural/watches": ("watch_exercises", [42] * 10),
    "natural/alphabets": ("omniglot_small", [15 * c for c in (24, 22, 24, 47, 40, 26, 42, 17)]),
    "natural/drawers": ("omniglot_small", None),
    "natural/newsgroups": ("newsgroups20", None),
}


def there(folder: Path, name: str) -> None:
    if not (folder / f"{name}.npz").is_file():
        pytest.skip(f"needs real data: {name}.npz in {folder}")


@pytest.mark.parametrize("name", SMALL)
def test_clients_are_those_that_exist(real_data: Path, name: str) -> None:
    file, sizes = SMALL[name]
    there(real_data, file)
    plan = Experiment.load(name)
    prepared = prepare(plan, real_data)
    split, (domain,) = prepared.split, prepared.domains
    if sizes is not None:
        assert [len(rows) for rows in split.train] == sizes
    assert all(len(rows) for rows in split.test)
    with torch.no_grad():
        for number in range(plan.clients):
            x, y = prepared.reference.federation.test(number)
            _, logits = prepared.module(number).eval()(x[:4])
            assert logits.shape == (4, domain.classes)
            assert logits.isfinite().all()
            assert set(np.unique(domain.y_test[split.test[number]])) == set(y.tolist())


def test_drawers_are_tested_on_other_people_of_their_alphabet(real_data: Path) -> None:
    there(real_data, "omniglot_small")
    (domain,), split = prepare_split(Experiment.load("natural/drawers"), real_data)
    people, strangers = domain.ids["drawer"]
    assert not set(people) & set(strangers)
    for rows, tests in zip(split.train, split.test, strict=True):
        assert len(set(people[rows])) == 1
        assert sorted(np.unique(domain.y_train[rows])) == sorted(domain.y_train[rows])  # one drawing of each
        assert set(domain.y_test[tests]) == set(domain.y_train[rows])
        assert len(tests) == 5 * len(rows)


def test_hospitals_differ_in_what_is_missing_and_need_a_model_that_takes_it(real_data: Path) -> None:
    there(real_data, "heart_disease4")
    plan = Experiment.load("natural/heart_disease")
    (domain,), split = prepare_split(plan, real_data)
    ca = [float(np.isnan(domain.x_train[rows, 11]).mean()) for rows in split.train]
    assert ca[0] < 0.05
    assert min(ca[1:]) > 0.9
    with pytest.raises(UserError, match=r"holds NaN, a missing value.*mlp_table.*\(mlp_digits\)"):
        prepare(Experiment.load("natural/heart_disease", "model=mlp_digits"), real_data)


def test_newsgroups_share_no_class(real_data: Path) -> None:
    there(real_data, "newsgroups20")
    plan = Experiment.load("natural/newsgroups")
    (domain,), split = prepare_split(plan, real_data)
    assert (split.counts([domain]) > 0).sum(0).max() == 1
    heads = [{domain.class_names[c].partition(".")[0] for c in domain.y_train[rows]} for rows in split.train]
    assert heads == [{"comp"}, {"rec"}, {"sci"}, {"talk"}]
    assert domain.x_train.dtype == np.int64  # tokens stay whole
    with pytest.raises(UserError, match=r"token \d+, but it knows 50\. Set model\.words"):
        prepare(Experiment.load("natural/newsgroups", "model.words=50"), real_data)


@pytest.mark.parametrize("name", SUITE)
def test_every_natural_federation_has_a_table(name: str) -> None:
    from protofed.papers.reproduce.entry import entry_names, load_entry

    entries = [load_entry(entry) for entry in entry_names() if entry.startswith("natural/")]
    (entry,) = [entry for entry in entries if entry.experiments == [name]]
    assert len(entry.sweep["seeds"]) >= 3
    plan = Experiment.load(name)
    titles = {column.metric for column in entry.columns}
    assert ("held_out_start_mean" in titles) == (plan.held_out_clients > 0)
    assert {"accuracy_mean", "accuracy_worst10"} <= titles


def test_every_table_has_the_same_methods_but_those_that_do_not_suit() -> None:
    from protofed.papers.reproduce.entry import entry_names, load_entry

    entries = [load_entry(entry) for entry in entry_names() if entry.startswith("natural/")]
    everything = {row for entry in entries for row in entry.rows}
    heads = {"fedpcl", "classmeans", "lda", "qda", "ridge"}  # on an encoder that nobody trains
    for entry in entries:
        joined = "held_out_start_mean" in {column.metric for column in entry.columns}
        left_out = (set() if entry.name == "natural/heart-disease" else heads) | (
            {"fesem", "fedpac"} if joined else set()  # nothing of theirs is for a newcomer
        )
        assert set(entry.rows) == everything - left_out, entry.name
