"""What a run keeps for reports: sums that add up, views that a forward pass gives again, kills that change nothing."""

import json
import shutil
import signal
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from small_runs import StopAfter, final_state, lines, small, start, wait_for

from protofed import Experiment, run
from protofed.data.names import class_names, official_superclasses
from protofed.engines.reference import ReferenceEngine
from protofed.errors import UserError
from protofed.method import Mean
from protofed.methods import METHODS
from protofed.metrics import judged_by, tally, without_answers
from protofed.runs import saved
from protofed.runs.folder import RunFolder
from protofed.runs.record import Means, Recorder, chosen_prototypes, due, movement, one_per_class, spread_over_classes
from protofed.runs.setup import prepare
from protofed.runs.watch import Watch

PARTS = ["train", "upload", "aggregate", "evaluate", "rest"]
JUDGING = ["fedproto", "fednh", "fedpr", "mpfedcl", "spfedcl", "dpfedcl", "classmeans", "fedtgp", "fedorgp", "fedpcl"]
# The others pull towards prototypes, and judge by a head.
WITH_PROTOTYPES = [*JUDGING, "fedpac", "fpl", "fedplvm", "fedproc", "i2pfl"]
FILES = ("views.npz", "confusion.npz", "classes.json")


def arrays(path: str | Path) -> dict[str, np.ndarray]:
    with np.load(path) as stored:
        return {name: stored[name] for name in stored.files}


def equal(left: str | Path, right: str | Path) -> None:
    one, other = arrays(left), arrays(right)
    assert one.keys() == other.keys()
    for name, part in one.items():
        np.testing.assert_array_equal(part, other[name], err_msg=name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing happened to; to be copied before it is changed."""
    return run(small(), tmp_path_factory.mktemp("whole") / "out").folder


# every round


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("fedproto", "stacked"),
        ("fedproto", "reference"),
        ("fednh", "stacked"),
        ("fesem", "stacked"),
        ("local", "stacked"),
    ],
)
def test_parts_and_kinds_add_up(name: str, engine: str) -> None:
    result = run(small(f"method={name}", "model=cnn_digits", "rounds=2", f"engine.name={engine}"), "out")
    for line in result.rounds:
        assert list(line["parts"]) == PARTS
        assert sum(line["parts"].values()) == pytest.approx(line["seconds"])
        assert min(line["parts"].values()) >= 0
        assert line["parts"]["train"] > 0
        assert sum(line["bytes_up_by"].values()) == line["bytes_up"]
        assert sum(line["bytes_down_by"].values()) == line["bytes_down"]
    up = result.rounds[-1]["bytes_up_by"]
    assert ("prototypes" in up) == (name in WITH_PROTOTYPES)
    assert ("weights" in up) == (name not in ("fedproto", "local"))
    if name == "fedproto":
        assert up["prototypes"] == sum(len(client["classes"]) for client in result.clients) * 32 * 4


def test_movement_by_hand() -> None:
    old = Means(np.array([[0.0, 0], [2, 0], [9, 9], [5, 5]]), np.array([True, True, True, False]))
    new = Means(np.array([[3.0, 4], [2, 1], [7, 7], [0, 0]]), np.array([True, True, False, False]))
    told = movement(old, new)
    assert told["drift"] == pytest.approx((5 + 1) / 2)  # classes 0 and 1: the third was lost, the fourth never there
    assert told["margin"] == told["margin_min"] == pytest.approx(10**0.5)
    three = Means(np.array([[0.0, 0], [2, 0], [2, 1]]), np.ones(3, bool))
    assert movement(three, three) == {"drift": 0, "margin": pytest.approx((2 + 1 + 1) / 3), "margin_min": 1}
    one = Means(np.ones((2, 3)), np.array([True, False]))
    assert movement(one._replace(held=~one.held), one) == {"drift": None, "margin": None, "margin_min": None}
    several = Mean(
        torch.tensor([[[1.0], [5.0], [99.0]], [[7.0], [0.0], [0.0]]]), torch.tensor([[1.0, 1, 0], [0, 0, 0]])
    )
    assert one_per_class(several).rows[0].tolist() == [3]
    assert one_per_class(several).held.tolist() == [True, False]


@pytest.mark.parametrize("name", ["fedproto", "fednh", "mpfedcl"])
def test_lines_tell_how_the_servers_prototypes_moved(name: str) -> None:
    """Between the two checkpoints that a run keeps."""
    plan = small(f"method={name}", "model=cnn_digits", "participation=0.7")
    result = run(plan, "out", checkpoint_seconds=0)
    last, _ = RunFolder(result.folder).restore()
    shutil.rmtree(RunFolder(result.folder).checkpoints()[0])
    before, _ = RunFolder(result.folder).restore()
    assert last is not None
    assert before is not None
    assert (before.round, last.round) == (2, 3)
    rows = {}
    for state in (before, last):
        prototypes = plan.method.prototypes(state.server)
        assert prototypes is not None
        there = prototypes.weight.bool()
        rows[state.round] = {c: prototypes.total[c][there[c]].mean(0) for c in range(10) if there[c].any()}
    both = [c for c in rows[2] if c in rows[3]]
    drift = np.mean([float((rows[3][c] - rows[2][c]).norm()) for c in both])
    apart = [min(float((z - y).norm()) for d, y in rows[3].items() if d != c) for c, z in rows[3].items()]
    line = result.rounds[-1]
    assert line["drift"] == pytest.approx(drift, rel=1e-4)
    assert line["margin"] == pytest.approx(np.mean(apart), rel=1e-4)
    assert line["margin_min"] == pytest.approx(min(apart), rel=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_prototypes_are_those_it_judges_by(name: str) -> None:
    # FedNH's clients are scored with what they downloaded, FedPCL's by their own prototypes
    newest = {"fednh": ["method.scored_by=newest"], "fedpcl": ["method.judged_by=mean"]}.get(name, [])
    plan = small(f"method={name}", "model=cnn_digits", "engine.name=reference", *newest)
    method, engine = plan.method, prepare(plan).engine
    assert isinstance(engine, ReferenceEngine)
    server = method.init_server(engine.specs()[0])
    trained = engine.train(method, server, [0, 1, 2], 0)
    server = method.aggregate(server, trained.up, torch.arange(3))
    prototypes = method.prototypes(server)
    assert (prototypes is not None) == (name in WITH_PROTOTYPES)
    if prototypes is None:
        return
    x, client = engine.federation.global_test(0).x[:50], trained.clients[1]
    z = method.embed(engine.model(1), client, x)
    assert prototypes.total.shape == (10, prototypes.weight.shape[1], z.shape[1])
    if name not in JUDGING:
        return
    apart = (z[:, None, None] - prototypes.total).norm(dim=-1).masked_fill(prototypes.weight == 0, torch.inf)
    scores = method.predict(engine.model(1), client, x, method.broadcast(server, torch.tensor([1])))
    said = scores.get("proto", scores["head"]).argmax(1)  # FedNH's head are its prototypes
    assert torch.equal(apart.amin(-1).argmin(1), said)


# who is taken for whom


@pytest.mark.parametrize("name", ["fedproto", "fednh", "mpfedcl", "fesem", "ditto"])
def test_engines_agree_on_every_answer(name: str) -> None:
    plan = small(f"method={name}", "model=cnn_digits")
    method, judge = plan.method, judged_by(plan.method)
    one, many = (prepare(small(f"method={name}", "model=cnn_digits", f"engine.name={e}")).engine for e in
                 ("reference", "stacked"))  # fmt: skip
    server = method.init_server(one.specs()[0])
    trained = one.train(method, server, range(5), 0)
    server = method.aggregate(server, trained.up, torch.arange(5))
    one.clients = many.clients = dict(trained.clients)
    for on, who in (("own", "personal"), ("global", "personal"), ("own", "global")):
        if who == "global" and method.global_client(server) is None:
            continue
        left, right = (e.evaluate(method, server, range(6), on=on, who=who, confusion=judge) for e in (one, many))
        assert left[0].keys() == right[0].keys()
        for a, b in zip(left, right, strict=True):
            assert all(torch.equal(x, y) for kind in a for x, y in zip(a[kind][:2], b[kind][:2], strict=True))
            assert torch.equal(a[judge].said, b[judge].said)
            assert torch.equal(a[judge].said.diagonal(), a[judge].right)
            assert torch.equal(a[judge].said.sum(1), a[judge].samples) or method.inference == "proto"
            assert all(a[kind].said == () for kind in a if kind != judge)
        plain = one.evaluate(method, server, range(6), on=on, who=who)
        for a, b in zip(without_answers(left), plain, strict=True):
            assert all(torch.equal(x, y) for kind in a for x, y in zip(a[kind][:2], b[kind][:2], strict=True))
            assert all(a[kind].said == b[kind].said == () for kind in a)
    left_whole, right_whole = (e.global_tally(method, server, method.inference) for e in (one, many))
    assert (left_whole is None) == (right_whole is None)
    if left_whole is not None and right_whole is not None:
        assert torch.equal(left_whole[method.inference].said, right_whole[method.inference].said)


def test_answers_by_hand() -> None:
    scores = torch.tensor([[3.0, 2, 1], [0, 5, 4], [1, 0, 2], [-torch.inf] * 3])
    y, own = torch.tensor([0, 2, 2, 1]), torch.tensor([True, False, True])
    found = tally({"head": scores}, y, own, torch.tensor([1, 1, 1, 1]), confusion="head")
    assert found["head"].said.tolist() == [[1, 0, 0], [0, 0, 0], [0, 1, 1]]  # the last sample has no answer
    assert tally({"head": scores}, y, own, torch.tensor([1, 0, 1, 1]), confusion="head")["head"].said[2, 1] == 0
    among = tally({"head": scores}, y, own, confusion="head_own")["head_own"].said
    assert among.tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 2]]


def test_confusion_is_what_the_summary_was_counted_from(whole: Path) -> None:
    result = run(small("method=mpfedcl", "model=cnn_digits", "clients=12"), "out")
    found = arrays("out/confusion.npz")
    assert {name: (part.shape, part.dtype) for name, part in found.items()} == {
        "personal": ((10, 10), np.int64),
        "global": ((10, 10), np.int64),
    }
    assert found["personal"].sum() == sum(client["test"] for client in result.clients)
    right = sum(client["accuracy"] * client["test"] for client in result.clients)
    assert np.trace(found["personal"]) == pytest.approx(right)
    each = found["personal"].diagonal() / found["personal"].sum(1)
    np.testing.assert_allclose(each, result.summary["accuracy_per_class"])
    assert np.trace(found["global"]) / found["global"].sum() == pytest.approx(result.summary["global_accuracy"])
    assert list(arrays(whole / "confusion.npz")) == ["personal"]  # no global model


# where samples lie


@pytest.mark.parametrize("name", ["fedproto", "fednh", "ditto"])
def test_views_are_a_forward_pass_through_the_clients_models(name: str) -> None:
    model = () if name == "fedproto" else ("model=cnn_digits",)  # the demo deals three architectures
    plan = small(f"method={name}", *model, "participation=0.5", "record.clients=4", "record.samples=20")
    run(plan, "out")
    views, prepared = arrays("out/views.npz"), prepare(plan)
    state, _ = RunFolder(Path("out")).restore()
    assert state is not None
    assert views["rounds"].tolist() == [1, 2, 3]
    assert views["z"].shape == (3, len(views["labels"]), 32)
    assert sorted(set(views["client"].tolist())) == [0, 1, 3, 4]
    assert len(views["labels"]) <= 20
    federation = prepared.engine.federation  # type: ignore[attr-defined]
    for place, number in enumerate([0, 1, 3, 4]):
        if number not in state.clients:
            continue
        module: Any = plan.model_of(number)(federation.shape(number), 10).eval()
        at = "personal." if name == "ditto" else ""
        params = {k.removeprefix(at): v for k, v in state.clients[number].params.items() if k.startswith(at)}
        module.load_state_dict({k: v for k, v in params.items() if k in module.state_dict()})
        test, train = federation.test(number), federation.train(number)
        rows = spread_over_classes(test.y, 5)
        assert torch.equal(torch.tensor(views["labels"][views["client"] == number]), test.y[rows])
        with torch.no_grad():
            z, own = module.body(test.x[rows]), module.body(train.x)
        if name == "fednh":
            z, own = z / z.norm(dim=1, keepdim=True), own / own.norm(dim=1, keepdim=True)
        torch.testing.assert_close(torch.tensor(views["z"][-1][views["client"] == number]), z)
        for c in range(10) if name != "ditto" else ():
            assert bool(views["local_held"][-1, place, c]) == bool((train.y == c).any())
            if (train.y == c).any():
                mean = torch.tensor(views["local_prototypes"][-1, place, c])
                torch.testing.assert_close(mean, own[train.y == c].mean(0))
    if name == "ditto":  # has none
        assert views["global_prototypes"].shape == (3, 0, 32)
        assert views["local_prototypes"].shape == (3, 0, 10, 32)
        assert len(views["local_clients"]) == len(views["global_class"]) == 0
        assert "drift" not in lines(Path("out"))[-1]
        return
    prototypes = plan.method.prototypes(state.server)
    assert prototypes is not None
    np.testing.assert_array_equal(views["global_prototypes"][-1], prototypes.total[:, 0])
    np.testing.assert_array_equal(views["global_held"][-1], prototypes.weight[:, 0] > 0)
    assert views["global_class"].tolist() == list(range(10))
    assert views["local_clients"].tolist() == [0, 1, 3, 4]


def test_of_several_prototypes_some_are_shown() -> None:
    weight = torch.zeros(3, 40)
    weight[0, ::2], weight[1, 7] = 1, 1
    total = torch.arange(40.0).expand(3, 40)[..., None] + torch.zeros(3, 40, 2)
    several, which = chosen_prototypes(Mean(total, weight), 3, 2)
    assert which.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    assert several.total[:8, 0].tolist() == [0, 4, 10, 14, 20, 24, 30, 34]
    assert several.weight.tolist() == [1] * 8 + [1] + [0] * 7 + [0] * 8
    assert several.total[8].tolist() == [7, 7]
    assert len(chosen_prototypes(Mean(torch.zeros(200, 5, 2), torch.ones(200, 5)), 200, 2)[1]) == 400


def test_samples_are_chosen_by_class() -> None:
    y = torch.tensor([0] * 50 + [1] * 3 + [2])
    assert spread_over_classes(y, 100).tolist() == list(range(54))
    assert y[spread_over_classes(y, 9)].bincount().tolist() == [5, 3, 1]
    many = torch.arange(100).repeat(3)
    few = spread_over_classes(many, 10)
    assert many[few].tolist() == list(range(0, 100, 10))  # not the first ten classes
    assert len(spread_over_classes(torch.arange(0), 5)) == 0
    assert spread_over_classes(torch.tensor([1, 1]), 1).tolist() == [0]


def test_snapshots_are_of_the_first_the_last_and_some_rounds_between() -> None:
    assert due(100, 8) == [1, 15, 29, 43, 57, 71, 85, 100]
    assert due(3, 8) == [1, 2, 3]
    assert due(50, 1) == [50]
    assert due(50, 0) == []
    assert due(1, 8) == [1]


def test_models_of_other_widths_are_left_out() -> None:
    Path("wide.toml").write_text(
        'rounds = 1\nclients = 4\n[partition]\nshots = 5\n[method]\nname = "local"\n[[model]]\nname = "cnn_digits"\n'
        '[[model]]\nname = "mlp_digits"\ndim = 7\n'
    )
    run(Experiment.load("wide.toml"), "out")
    views = arrays("out/views.npz")
    assert set(views["client"].tolist()) == {0, 1}
    assert views["z"].shape[2] == 32


def test_clients_without_tests_are_no_harm() -> None:
    x, y = np.random.default_rng(0).normal(size=(12, 8, 8)).astype(np.float32), np.arange(12) % 2
    np.savez("mine.npz", x_train=x, y_train=y, x_test=x[:1], y_test=y[:1], class_names=["left", "right"])
    run(Experiment.load("demo", "data.name=mine.npz", "partition=iid", "clients=3", "rounds=2"), "out")
    assert len(arrays("out/views.npz")["labels"]) >= 1
    assert json.loads(Path("out/classes.json").read_text()) == {"names": ["left", "right"], "superclasses": None}


# switched off, killed, old


def test_recording_changes_no_result_and_can_be_switched_off(whole: Path) -> None:
    run(small("record.enabled=false"), "off")
    new = ("drift", "margin", "margin_min")
    on, off = final_state(whole), final_state(Path("off"))
    assert [{k: v for k, v in line.items() if k not in new} for line in lines(whole)] == lines(Path("off"))
    assert {k: v for k, v in on.items() if k != "rounds"} == {k: v for k, v in off.items() if k != "rounds"}
    assert not any(Path("off", name).exists() for name in FILES[:2])
    run(small("record.snapshots=0"), "few")
    assert [Path("few", name).exists() for name in FILES] == [False, True, True]


@pytest.mark.slow
def test_killed_and_resumed_keeps_the_same_files() -> None:
    overrides = ("rounds=9", "participation=0.7")
    run(small(*overrides), "whole", checkpoint_seconds=0)
    process = start("cut", *overrides)
    assert wait_for(lambda: len(RunFolder(Path("cut")).rounds()) > 3, process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert Path("cut/views.npz").is_file()  # while it goes on, too
    run(small(*overrides), "cut", resume=True)
    for name in FILES[:2]:
        equal(f"whole/{name}", f"cut/{name}")
    assert lines(Path("whole")) == lines(Path("cut"))
    assert not list(Path("cut").rglob(".*.partial"))


def test_snapshots_of_rounds_that_do_not_count_are_cut(whole: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run(small(), "cut", watch=StopAfter(2, ZeroDivisionError))  # no checkpoint since the start
    assert arrays("cut/views.npz")["rounds"].tolist() == [1, 2]
    plan = small()
    recorder = Recorder(RunFolder(Path("cut")), plan, prepare(plan).engine, 1, lambda text: None)
    assert arrays("cut/views.npz")["rounds"].tolist() == [1]
    assert recorder.due == {1, 2, 3}
    run(plan, "cut", resume=True)
    equal(whole / "views.npz", "cut/views.npz")


def test_damaged_views_cost_no_run() -> None:
    with pytest.raises(ZeroDivisionError):
        run(small(), "out", watch=StopAfter(2, ZeroDivisionError), checkpoint_seconds=0)
    whole = Path("out/views.npz").read_bytes()
    Path("out/views.npz").write_bytes(whole[: len(whole) // 2])
    said: list[str] = []
    watch = Watch()
    watch.note = said.append  # type: ignore[method-assign]
    run(small(), "out", resume=True, watch=watch)
    assert any("views.npz is damaged" in text for text in said)
    assert arrays("out/views.npz")["rounds"].tolist()[-1] == 3


def test_folders_without_these_files_still_load_and_go_on(whole: Path) -> None:
    """As a version before this one left them."""
    plan = small()
    shutil.copytree(whole, "done")
    with pytest.raises(ZeroDivisionError):
        run(plan, "half", watch=StopAfter(2, ZeroDivisionError), checkpoint_seconds=0)
    for folder in ("done", "half"):
        for name in FILES:
            Path(folder, name).unlink(missing_ok=True)
        before = tomllib.loads(Path(folder, "experiment.toml").read_text())
        del before["record"]
        Path(folder, "experiment.toml").write_text(tomli_w.dumps(before))
        new = ("parts", "bytes_up_by", "bytes_down_by", "drift", "margin", "margin_min")
        old = [{k: v for k, v in line.items() if k not in new} for line in RunFolder(Path(folder)).rounds()]
        Path(folder, "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    result = run(plan, "done", resume=True)
    assert (len(result.rounds), len(result.clients)) == (3, 6)
    assert not Path("done/views.npz").exists()
    result = run(plan, "half", resume=True)
    assert ["parts" in line for line in result.rounds][-1]
    assert arrays("half/views.npz")["rounds"].tolist()[-1] == 3


# names


def test_classes_have_the_names_of_well_known_data() -> None:
    numbers = tuple(map(str, range(100)))
    names = class_names("data/cifar100.npz", numbers)
    assert (names[0], names[-1], names[80]) == ("apple", "worm", "squirrel")
    groups = official_superclasses(names)
    assert groups is not None
    assert (groups[0], groups[-1], len(set(groups))) == ("fruit and vegetables", "non-insect invertebrates", 20)
    assert class_names("torchvision:CIFAR10", numbers[:10])[:2] == ["airplane", "automobile"]
    assert class_names("fashion-mnist", numbers[:10])[9] == "Ankle boot"
    assert class_names("pacs32_photo", numbers[:7])[3] == "guitar"
    assert class_names("office_caltech10_surf_dslr", numbers[:10])[1] == "touring bike"
    assert class_names("cifar10", numbers[:9]) == list(numbers[:9])  # not that data set
    assert class_names("cifar10", tuple("abcdefghij")) == list("abcdefghij")  # it has names of its own
    assert class_names("digits", numbers[:10]) == list(numbers[:10])
    assert official_superclasses(["apple", "worm"]) is None


def test_superclasses_are_those_of_the_file(real_data: Path) -> None:
    coarse = np.load(real_data / "cifar100.npz")["coarse_of_fine"]
    groups = official_superclasses(class_names("cifar100", tuple(map(str, range(100)))))
    assert groups is not None
    assert len(set(zip(coarse.tolist(), groups, strict=True))) == len(set(groups)) == 20


def test_a_finished_run_need_not_keep_its_models(whole: Path) -> None:
    light = small("record.models=false")
    run(light, "light")
    assert lines(Path("light")) == lines(whole)
    assert not Path("light/checkpoints").exists()
    assert run(light, "light", resume=True).summary == RunFolder(Path("light")).summary()  # finished: nothing is run
    with pytest.raises(UserError, match=r"kept no models \(record.models = false\)"):
        saved.read_checkpoint("light")
