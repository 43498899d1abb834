"""One head from sums in a folder: clients come and leave exactly, and what cannot be is refused."""

import json
import resource
import shlex
from pathlib import Path

import numpy as np
import pytest
import small_encoder
import torch
from blocks import blocks
from checkout import ROOT
from command import protofed
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file

from protofed import UserError
from protofed.data.domain import Domain
from protofed.joining.heads import SummedHead, plan_of
from protofed.method import Mean
from protofed.runs import frozen

METHODS = ("classmeans", "lda", "qda", "ridge")


@pytest.fixture(autouse=True)
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_encoder.known(monkeypatch)
    monkeypatch.setenv("PROTOFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(frozen, "WORTH", -1.0)


def quiet(text: str) -> None:
    pass


def begun(method: str = "lda") -> SummedHead:
    return SummedHead.begun(plan_of("small_encoder", method), (1, 8, 8))


def client(seed: int, samples: int = 30, names: tuple[str, ...] = ("cat", "dog", "owl"), tests: int = 5) -> Domain:
    """Embeddings (as `embed` gives them) that tell classes apart."""
    rng = np.random.default_rng(seed)
    places = ("cat", "dog", "owl", "eel")
    parts = []
    for many in (samples, tests):
        y = rng.integers(0, len(names), many)
        centres = 3 * np.eye(12)[[places.index(names[k]) for k in y]]
        x = (centres + rng.normal(0, 0.3, (many, 12))).astype(np.float32)
        parts += [x, y]
    return Domain(f"site-{seed}", *parts, class_names=names)


def same(left: SummedHead, right: SummedHead) -> bool:
    """To the bit, for the same order of classes."""
    order = [left.classes.index(name) for name in right.classes]
    one, two = left.head(), right.head()
    return all(torch.equal(one[key][order] if one[key].ndim else one[key], two[key]) for key in two)


@pytest.mark.parametrize("method", METHODS)
def test_those_who_left_leave_nothing_behind(method: str) -> None:
    head, without = begun(method), begun(method)
    for number in (0, 1, 2):
        head.add(f"c{number}", client(number))
        if number != 1:
            without.add(f"c{number}", client(number))
    assert not same(head, without)
    head.leave("c1", client(1))
    assert same(head, without)
    assert list(head.clients) == ["c0", "c2"]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=40, max_size=40), st.permutations(range(4)))
def test_any_split_in_any_order_gives_the_head_of_all(owner: list[int], order: list[int]) -> None:
    whole, owned = client(9, 40), np.array(owner)
    pooled = SummedHead.begun(plan_of("small_encoder", "lda"), (1, 8, 8))
    pooled.add("all", whole)
    split = SummedHead.begun(plan_of("small_encoder", "lda"), (1, 8, 8))
    for number in order:
        rows = owned == number
        split.add(f"c{number}", Domain("c", whole.x_train[rows], whole.y_train[rows], *_none(), whole.class_names))
    assert same(split, pooled)


def _none() -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((0, 12), np.float32), np.zeros(0, np.int64)


@pytest.mark.parametrize("method", METHODS)
def test_new_classes_come_with_new_clients_and_go_with_them(method: str) -> None:
    head = begun(method)
    head.add("first", client(0))
    before = {key: value.clone() for key, value in head.head().items()}
    late = client(1, names=("eel", "cat"))
    head.add("late", late)
    assert head.classes == ["cat", "dog", "owl", "eel"]
    right, many = head.right(late)
    assert right == many == 5
    head.leave("late", late)
    after = head.head()
    assert not bool(after["held"][3])
    assert torch.equal(after["held"][:3], before["held"])
    rest = begun(method)
    rest.add("first", client(0))
    assert all(torch.equal(after[k][:3] if after[k].ndim else after[k], v) for k, v in rest.head().items())


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    head = begun()
    head.add("north", client(0))
    head.save(tmp_path / "head")
    head.add("south", client(1))
    head.save(tmp_path / "head")
    assert len(list((tmp_path / "head").glob("sums-*"))) == 1
    found = SummedHead.read(tmp_path / "head")
    assert same(found, head)
    assert found.clients == head.clients
    found.leave("south", client(1))
    kept = load_file(tmp_path / "head" / "head.safetensors")
    assert torch.equal(kept["weight"], head.head()["weight"])


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    head = begun()
    head.add("north", client(0))
    head.save(tmp_path / "head")
    (sums,) = (tmp_path / "head").glob("sums-*")
    whole, about = sums.read_bytes(), (tmp_path / "head" / "about.json").read_text()
    sums.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match="sums are not what was written"):
        SummedHead.read(tmp_path / "head")
    sums.write_bytes(whole)
    for key, value in {
        "format": 2,
        "classes": ["cat"],
        "clients": 3,
        "sums": 7,
        "experiment": {"model": "os:getcwd"},
    }.items():
        (tmp_path / "head" / "about.json").write_text(json.dumps(json.loads(about) | {key: value}))
        with pytest.raises(UserError):
            SummedHead.read(tmp_path / "head")


def test_a_client_cannot_leave_with_other_samples_or_come_twice() -> None:
    head = begun()
    head.add("north", client(0))
    with pytest.raises(UserError, match="north is in this head already"):
        head.add("north", client(1))
    for other in (client(1), client(0, names=("cat", "dog", "eel"))):
        with pytest.raises(UserError, match="leaves with other samples than it came with"):
            head.leave("north", other)
    with pytest.raises(UserError, match=r"client south is not in this head\. It has: north"):
        head.leave("south", client(0))


@pytest.mark.parametrize(
    ("encoder", "method", "more", "why"),
    [
        ("small_encoder", "fedavg", (), "--method fedavg is not made of sums"),
        ("cnn_digits", "lda", (), "sums need an encoder that stays as it is"),
        ("small_encoder", "lda", ("model.body=trained",), "sums need an encoder that stays as it is"),
        ("small_encoder", "lda", ("model.adapter=mlp",), "without an adapter"),
        ("small_encoder", "lda", ("method.personal=true",), "method.personal makes a head for each client"),
        ("smal_encoder", "lda", (), "small_encoder"),
    ],
)
def test_what_is_not_made_of_sums_is_refused(encoder: str, method: str, more: tuple[str, ...], why: str) -> None:
    with pytest.raises(UserError, match=why):
        plan_of(encoder, method, more)


def folders(home: Path) -> None:
    """Images of three sites, dark cats and bright dogs; the last also has owls, half of each."""
    rng = np.random.default_rng(0)
    for site in ("north", "south", "west"):
        for name, low in {"cat": 0, "dog": 160, **({"owl": 80} if site == "west" else {})}.items():
            (home / site / name).mkdir(parents=True)
            for number in range(10):
                pixels = rng.integers(low, low + 60, (8, 8)).astype(np.uint8)
                Image.fromarray(pixels).save(home / site / name / f"{number}.png")


def test_the_command_makes_a_head_of_folders_adds_a_client_and_lets_one_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders(tmp_path / "sites")
    (tmp_path / "later").mkdir()
    (tmp_path / "sites" / "west").rename(tmp_path / "later" / "west")
    here = ("tests/joining/test_heads.py", "test_the_command_makes_a_head_of_folders_adds_a_client_and_lets_one_leave")
    page = (ROOT / "docs" / "own-model.md").read_text(encoding="utf-8")
    (block,) = (block for block in blocks(page) if block.elsewhere == here)
    monkeypatch.chdir(tmp_path)
    first, second, third = (shlex.split(line, comments=True)[1:] for line in block.code.splitlines())
    head = first[1]
    made = protofed(*first, "--encoder", "small_encoder", "--method", "ridge")
    assert made.returncode == 0, made.stderr
    assert "of 2 clients with 32 samples and 2 classes" in made.stdout
    assert "100.0%" in made.stdout
    more = protofed(*second)
    assert "of 3 clients with 56 samples and 3 classes" in more.stdout, more.stderr
    less = protofed(*third)
    assert "south left" in less.stdout, less.stderr
    assert list(SummedHead.read(Path(head)).clients) == ["north", "west"]
    fresh = str(tmp_path / "fresh")
    again = [str(tmp_path / part) for part in ("sites/north", "later/west")]
    words = ["--encoder", "small_encoder", "--method", "ridge", *(w for c in again for w in ("--client", c))]
    assert protofed("oneshot", fresh, *words).returncode == 0
    one, two = (load_file(Path(f) / "head.safetensors") for f in (head, fresh))
    assert all(torch.equal(one[key], two[key]) for key in two)


def test_bad_words_of_the_command(tmp_path: Path) -> None:
    folders(tmp_path / "sites")
    sites, head = str(tmp_path / "sites"), str(tmp_path / "head")
    cases: list[tuple[list[str], str]] = [
        ([head], "--client DATA for who joins"),
        ([head, "--leave", sites], "is not a one-shot head"),
        ([sites, "--client", sites], "is not a one-shot head"),
        ([head, "--client", "nowhere", "--encoder", "small_encoder"], "'nowhere' was not found"),
        ([head, "--client", sites, "--method", "fedavg"], "not made of sums"),
    ]
    for words, why in cases:
        done = protofed("oneshot", *words)
        assert done.returncode != 0
        assert why in done.stderr, done.stderr
    assert not Path(head).exists()
    protofed("oneshot", head, "--client", f"{sites}/north", "--encoder", "small_encoder")
    done = protofed("oneshot", head, "--client", f"{sites}/south", "--method", "ridge")
    assert "is a head already" in done.stderr


def _client(**changed: object) -> dict[str, object]:
    return {"clients": {"n": {"samples": 3, "sums": "x"} | changed}}


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (_client(samples="x"), "a client has no number of samples"),
        (_client(samples=float("nan")), "a client has no number of samples"),
        (_client(samples=-1), "a client has no number of samples"),
        (_client(sums=None), "no hash of its sums"),
        ({"clients": {"n": "x"}}, "not a whole one-shot head"),
        ({"clients": []}, "not a whole one-shot head"),
        ({"classes": [1, {}, "c"]}, "its classes are not a list of names"),
        ({"classes": ["a", "a", "b"]}, "its classes are not a list of names"),
        ({"sums": "../../../elsewhere"}, "it has no hash of its sums"),
    ],
)
def test_words_of_somebody_elses_head_are_checked(tmp_path: Path, told: dict[str, object], said: str) -> None:
    SummedHead(plan_of("small_encoder", "lda"), ["a", "b", "c"]).save(tmp_path)
    about = json.loads((tmp_path / "about.json").read_text())
    (tmp_path / "about.json").write_text(json.dumps(about | told))
    with pytest.raises(UserError, match=said) as caught:
        SummedHead.read(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "about.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="not a whole one-shot head"):
        SummedHead.read(tmp_path)


def test_a_head_of_more_classes_than_its_sums_takes_no_memory(tmp_path: Path) -> None:
    """A short table may name so many that sums of nothing alone would fill a machine."""
    head = SummedHead(plan_of("small_encoder", "qda"), ["a", "b", "c"])
    head.sums = {key: Mean(mean.total.clone(), mean.weight.clone()) for key, mean in head.sums.items()}
    head.save(tmp_path)
    about = json.loads((tmp_path / "about.json").read_text())
    (tmp_path / "about.json").write_text(json.dumps(about | {"classes": [f"c{n}" for n in range(1_000_000)]}))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="do not have the form of its classes"):
        SummedHead.read(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 300_000  # kB; the table itself takes a third


@pytest.mark.parametrize("damage", ["NaN", "type", "weights"])
def test_sums_of_somebody_elses_head_are_checked(tmp_path: Path, damage: str) -> None:
    """Their hash fits: whoever wrote them wrote it, too."""
    head = SummedHead(plan_of("small_encoder", "lda"), ["a", "b"])
    changed = {
        "NaN": lambda mean: mean._replace(total=torch.full_like(mean.total, float("nan"), dtype=mean.total.dtype)),
        "type": lambda mean: mean._replace(total=mean.total.to(torch.uint8)),
        "weights": lambda mean: mean._replace(weight=torch.zeros(7, 3)),
    }[damage]
    good = head.head()
    head.sums = {key: changed(mean) for key, mean in head.sums.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SummedHead, "head", lambda self: good)
        head.save(tmp_path)
    with pytest.raises(UserError, match=r"its sums (are not all numbers|do not have the form)"):
        SummedHead.read(tmp_path)
