"""Exported models: the same answers outside protofed, in ONNX Runtime, and as plain tensors."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from command import protofed as command
from PIL import Image

import protofed
from protofed import Experiment, UserError, run
from protofed.data.sources import load
from protofed.export import export, of_newcomer, of_run
from protofed.export.calibrate import temperature
from protofed.export.graph import Network, raw
from protofed.export.predict import Predictor
from protofed.export.program import Program
from protofed.joining.newcomer import right_answers
from protofed.metrics import judged_by
from protofed.runs.cohort import held_out
from protofed.runs.folder import RunFolder
from protofed.runs.setup import prepare

ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
needs_onnx = pytest.mark.skipif(not ONNX, reason="needs onnx: pip install 'protofed[export]'")
PLAN = Experiment.load(
    "demo", "rounds=6", "clients=4", "held_out_clients=1", "model=mlp_digits", "method.init=common",
    "method.inference=proto", "method.candidates=own", "partition.shots=15", "join.steps=5",
)  # fmt: skip
# Nothing of protofed, in a process of its own: whatever imports it fails.
WITHOUT = "import sys; sys.modules['protofed'] = None\n"
CLIENT = next(number for number in range(4) if number not in held_out(PLAN))
NO = ["--no-onnx"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    run(PLAN, folder)
    return folder


@pytest.fixture(scope="module")
def made(finished: Path) -> Path:
    """The export of one client."""
    folder = finished.with_name("made")
    done = command("export", str(finished), "--client", str(CLIENT), "--out", str(folder), *([] if ONNX else NO))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    (digits,) = load(PLAN.data, None)
    return digits.x_test[:100]


def elsewhere(code: str, folder: Path) -> None:
    """Run where protofed cannot be imported."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + code], cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_the_predictor_answers_as_the_run_did(finished: Path, made: Path) -> None:
    prepared = prepare(PLAN)
    data = prepared.engine.reference.federation  # type: ignore[attr-defined]
    (line,) = (c for c in map(json.loads, (finished / "clients.jsonl").open()) if c["client"] == CLIENT)
    samples = data.test(CLIENT)
    about = json.loads((made / "about.json").read_text())
    raw = samples.x.numpy() * np.reshape(about["input"]["std"], (1, -1, 1, 1)) + np.reshape(about["input"]["mean"], -1)
    predictor = Predictor(made, unknown_above=np.inf)
    found = predictor.predict(raw)
    assert np.mean([p.number == y for p, y in zip(found, samples.y, strict=True)]) == pytest.approx(line["accuracy"])
    assert all(p.number in line["classes"] for p in found)  # among its own
    by_head = Predictor(made, by="head", among="all").predict(raw)
    right = np.mean([p.number == y for p, y in zip(by_head, samples.y, strict=True)])
    assert right == pytest.approx(line["accuracy_head"])
    state, _ = RunFolder(finished).restore()
    assert state is not None
    prototypes = PLAN.method.prototypes(state.server)
    assert prototypes is not None
    embedding, _, apart = predictor.outputs(raw)
    by_hand = np.linalg.norm(embedding[:, None] - prototypes.value[:, 0].numpy(), axis=-1)
    held = prototypes.weight[:, 0].numpy() > 0
    assert np.allclose(apart[:, held], by_hand[:, held], atol=1e-4)
    assert np.isinf(apart[:, ~held]).all()
    single = predictor(raw[0])
    assert not isinstance(single, list)
    assert (single.answer, single.number) == (found[0].answer, found[0].number)
    assert 0 < single.confidence <= 1
    assert single.distance == pytest.approx(min(single.distances[about["class_names"][c]] for c in line["classes"]))


def test_torch_export_and_plain_tensors_give_the_same_without_protofed(made: Path, x: np.ndarray) -> None:
    predictor = Predictor(made)
    embedding, scores, apart = predictor.outputs(x)
    np.savez(made.with_name("expected.npz"), x=x, embedding=embedding, scores=scores, apart=apart)
    elsewhere(
        """
import json, numpy as np, torch
from collections import OrderedDict
from torch import nn
from safetensors.torch import load_file
expected = np.load("../expected.npz")
x = torch.from_numpy(expected["x"])
net = torch.export.load("model.pt2").module()
for part, name in zip(net(x), ("embedding", "scores", "apart")):
    assert np.allclose(part.detach().numpy(), expected[name], atol=1e-5), name
assert len(net(x[:1])[0]) == 1 and len(net(x[:7])[0]) == 7  # any number of samples

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layers = dict(flatten=nn.Flatten(), fc1=nn.Linear(64, 64), relu1=nn.ReLU(), fc2=nn.Linear(64, 32))
        self.body = nn.Sequential(OrderedDict(layers | dict(relu2=nn.ReLU())))
        self.head = nn.Sequential(OrderedDict(fc=nn.Linear(32, 10)))

plain = Net()
plain.load_state_dict(load_file("model.safetensors"))
about = json.load(open("about.json"))
unit, mean, std = (torch.tensor(about["input"][key]) for key in ("unit", "mean", "std"))
z = plain.body((x / unit - mean) / std)
assert np.allclose(z.detach().numpy(), expected["embedding"], atol=1e-5)
assert np.allclose(plain.head(z).detach().numpy(), expected["scores"], atol=1e-5)
kept = load_file("prototypes.safetensors")
apart = torch.cdist(z, kept["prototypes"][:, 0])
held = kept["held"][:, 0].numpy() > 0
assert np.allclose(apart.detach().numpy()[:, held], expected["apart"][:, held], atol=1e-3)
assert len(about["class_names"]) == 10
""",
        made,
    )


@needs_onnx
def test_onnx_runtime_agrees(made: Path, x: np.ndarray) -> None:
    torch_outputs, onnx_outputs = (Predictor(made / name).outputs(x) for name in ("model.pt2", "model.onnx"))
    for ours, theirs in zip(torch_outputs, onnx_outputs, strict=True):
        finite = np.isfinite(ours)
        assert np.array_equal(finite, np.isfinite(theirs))
        assert np.abs(ours[finite] - theirs[finite]).max() < 1e-4
    answers = [[p.answer for p in Predictor(made / name).predict(x)] for name in ("model.pt2", "model.onnx")]
    assert answers[0] == answers[1]
    elsewhere(
        """
import numpy as np, onnxruntime
session = onnxruntime.InferenceSession("model.onnx")
assert [len(out) for out in session.run(None, {"x": np.zeros((5, 1, 8, 8), np.float32)})] == [5, 5, 5]
""",
        made,
    )


def test_what_is_far_is_unknown(made: Path, x: np.ndarray) -> None:
    predictor = Predictor(made)
    about = predictor.about["unknown"]
    assert about["quantile"] == 0.95
    assert 0 <= about["own_test_unknown"] < 0.5
    far = predictor.predict(1000 * x[:20] + 500)
    assert all(p.unknown and p.answer == "unknown" and p.label in predictor.class_names for p in far)
    everything = Predictor(made, unknown_above=0).predict(x[:20])
    assert all(p.unknown for p in everything)
    assert not any(p.unknown for p in Predictor(made, unknown_above=np.inf).predict(1000 * x[:20]))


def test_the_temperature_is_that_of_the_likeliest() -> None:
    """Scores whose labels are drawn by softmax(scores / 3) are best divided by 3."""
    generator = torch.Generator().manual_seed(0)
    scores = 6 * torch.randn(4000, 5, generator=generator)
    y = torch.multinomial(torch.softmax(scores / 3, 1), 1, generator=generator)[:, 0]
    assert temperature(scores, y, torch.ones(5, dtype=torch.bool)) == pytest.approx(3, rel=0.25)


def test_the_command_reads_arrays_and_images(made: Path, x: np.ndarray) -> None:
    np.save("all.npy", x[:3, 0])  # (N, H, W)
    np.savez("named.npz", x=x[:2].transpose(0, 2, 3, 1))  # (N, H, W, C)
    Path("pictures").mkdir()
    for row in range(2):
        pixels = Image.fromarray((255 * x[row, 0]).round().astype(np.uint8))
        pixels.resize((8, 8)).convert("RGB").save(f"pictures/{row}.png")
    expected = Predictor(made).predict(x[:3])
    told = json.loads(command("predict", str(made), "all.npy", "named.npz", "pictures", "--json").stdout)
    assert [row["input"] for row in told[-2:]] == ["pictures:0.png", "pictures:1.png"]
    assert [row["label"] for row in told] == [expected[i].label for i in (0, 1, 2, 0, 1, 0, 1)]
    assert told[0]["distance"] == pytest.approx(expected[0].distance, rel=1e-4)
    lines = command("predict", str(made), "all.npy", "--csv").stdout.splitlines()
    assert lines[0] == "input,answer,label,confidence,distance"
    assert len(lines) == 4
    shown = command("predict", str(made), "all.npy", "--unknown-above", "0")
    assert "3 inputs, 3 unknown" in shown.stdout


def test_a_global_model_without_prototypes_is_exported_by_head_only(x: np.ndarray) -> None:
    run(Experiment.load("demo", "rounds=2", "clients=3", "model=cnn_digits", "method=fedavg"), "out")
    subject, notes = of_run("out", "global")
    assert any("by head only" in note for note in notes)
    about = export(subject, Path("made"), onnx=False)
    assert (about["client"], about["outputs"], about["unknown"]) == ("global", ["embedding", "scores"], None)
    found = Predictor("made").predict(x[:5])
    assert all(p.distance is None and not p.unknown for p in found)
    with pytest.raises(UserError, match="by head only"):
        Predictor("made", by="proto")
    done = command("export", "out", "--client", "1", "--out", "again", "--no-onnx")
    assert "by head only" in done.stderr
    assert not Path("again/model.onnx").exists()


@pytest.mark.parametrize("method", ["fednh", "ditto", "mpfedcl", "fedrod"])
def test_methods_that_classify_in_their_own_way(method: str, x: np.ndarray) -> None:
    """FedNH's prototypes are its head, Ditto has a second network, MP-FedCL a pool, FedROD a second head."""
    plan = Experiment.load(
        "demo", "rounds=1", "clients=2", "model=cnn_digits", f"method={method}", "record.enabled=false"
    )
    run(plan, "out")
    subject, _ = of_run("out", 0)
    export(subject, Path("made"), onnx=False)
    engine = prepare(plan).engine.reference  # type: ignore[attr-defined]
    for by in ("head", "proto") if subject.prototypes is not None else ("head",):
        tally = right_answers(subject.method, engine, 0, subject.client, subject.down, subject.prototypes, "own")
        test = engine.federation.test(0)
        scale = Predictor("made").about["input"]
        raw = test.x.numpy() * np.reshape(scale["std"], (1, -1, 1, 1)) + np.reshape(scale["mean"], -1)
        found = Predictor("made", by=by, among="all").predict(raw)
        right = np.mean([p.number == y for p, y in zip(found, test.y, strict=True)])
        assert right == pytest.approx(tally[by].accuracy()), judged_by(subject.method)
    assert Path("made/beside.safetensors").exists() == (method in ("fednh", "ditto", "fedrod"))


@pytest.mark.parametrize("method", ["fednh", "fedproto method.scored_by=downloaded", "fedpcl"])
def test_a_client_answers_by_the_prototypes_that_its_run_scored_it_with(method: str) -> None:
    """Those of an earlier round, or its own: not the server's newest."""
    plan = Experiment.load(
        "demo", "rounds=4", "clients=6", "participation=0.4", "model=cnn_digits", "record.enabled=false",
        "optimizer.lr=0.1", f"method={method.split()[0]}", *method.split()[1:],
    )  # fmt: skip
    run(plan, "out")
    state, _ = RunFolder(Path("out")).restore()
    assert state is not None
    engine = prepare(plan).engine
    engine.clients = state.clients
    tallies = engine.evaluate(plan.method, state.server, range(6), on="own", who="personal")
    differing = 0
    for number, tally in enumerate(tallies):
        subject, _ = of_run("out", number)
        _, scores, distances = Network(subject).eval()(raw(subject.test.x, subject.inputs))
        rules = {"head": scores, "proto": -distances}
        for name in tally.keys() & rules.keys():
            right = rules[name].argmax(1) == subject.test.y
            assert float(right.float().mean()) == pytest.approx(tally[name].accuracy()), (number, name)
        kept, newest = subject.prototypes, plan.method.prototypes(state.server)
        assert kept is not None
        assert newest is not None
        differing += not torch.equal(kept.value, newest.value)
        if method == "fednh":  # whose head are its prototypes
            assert torch.equal(distances.argmin(1), scores.argmax(1))
    assert differing


def test_a_newcomer_is_exported(finished: Path, x: np.ndarray) -> None:
    done = protofed.join(finished, client=held_out(PLAN)[0])
    about = export(of_newcomer(finished, done), Path("made"), onnx=False)
    assert about["client"] == "newcomer"
    assert about["own_classes"] == done.records[0]["classes"]
    assert "held-back samples" in about["fitted_to"]
    assert len(Predictor("made").predict(x)) == 100


def test_bad_input_is_one_line(finished: Path, made: Path, x: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(finished, "hurt")
    for path in Path("hurt/checkpoints").glob("round-*/server.safetensors"):
        path.write_bytes(path.read_bytes()[:-9] + b"123456789")
    shutil.copytree(made, "torn")
    Path("torn/model.pt2").write_bytes(b"no zip")
    np.save("wide.npy", np.zeros((2, 1, 9, 9), np.float32))
    np.save("words.npy", np.array([["a"]]))
    np.save("nan.npy", np.full((1, 1, 8, 8), np.nan, np.float32))
    Path("broken.npy").write_bytes(b"nothing")
    (out,) = held_out(PLAN)
    cases = [
        (("export", "nowhere", "--client", "0", "--out", "e"), "is not a run"),
        (("export", str(finished), "--client", "9", "--out", "e"), "clients 0 to 3"),
        (("export", str(finished), "--client", "x", "--out", "e"), "a client's number"),
        (("export", str(finished), "--client", str(out), "--out", "e"), "held out of training"),
        (("export", str(finished), "--client", "global", "--out", "e"), "no global model"),
        (("export", str(finished), "--client", "0", "--out", str(made)), "already exists"),
        (("export", "hurt", "--client", "0", "--out", "e"), "no checkpoint that is whole"),
        (("predict", "nowhere", "wide.npy"), "there is no exported model"),
        (("predict", str(finished), "wide.npy"), "is not an exported model"),
        (("predict", "torn", "wide.npy"), "is not what SHA256SUMS says"),
        (("predict", str(made), "wide.npy"), "the model takes (any number, 1, 8, 8)"),
        (("predict", str(made), "words.npy"), "inputs have shape"),
        (("predict", str(made), "nan.npy"), "NaN"),
        (("predict", str(made), "broken.npy"), "cannot be read"),
        (("predict", str(made), "missing.npy"), "there is no missing.npy"),
        (("predict", str(made), "wide.npy", "--by", "luck"), "by = 'luck' is unknown. Use head or proto."),
    ]
    for words, message in cases:
        done = command(*words, *(NO if words[0] == "export" else []))
        assert done.returncode == 2, words
        assert message in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = command("export", str(finished), "--client", str(CLIENT), "--out", "e")
    assert "pip install 'protofed[export]'" in done.stderr
    assert not Path("e").exists()
    assert not list(Path().glob(".*.partial"))


def test_an_unfinished_run_gives_its_last_checkpoint(finished: Path) -> None:
    shutil.copytree(finished, "half")
    Path("half/summary.json").unlink()
    _, notes = of_run("half", CLIENT)
    assert any("is not finished: this is its state after round 6 of 6" in note for note in notes)


@needs_onnx
def test_images_of_bytes_are_given_as_float32(tmp_path: Path) -> None:
    import onnxruntime

    y = np.arange(40) % 2
    x = (np.random.default_rng(0).integers(0, 100, (40, 1, 8, 8)) + 150 * y[:, None, None, None]).astype(np.uint8)
    done = protofed.federate("mlp_digits", [(x, y)] * 2, rounds=2, quiet=True, lr=0.01)
    about = done.export(tmp_path / "out")
    assert (about["input"]["dtype"], about["input"]["takes"]) == ("uint8", "float32")
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    assert session.get_inputs()[0].type == "tensor(float)"
    scores = session.run(["scores"], {"x": x.astype("float32")})[0]
    shown = protofed.federate("mlp_digits", [(x, y)] * 2, rounds=2, quiet=True, lr=0.01, inference="head")
    assert scores.argmax(1).tolist() == shown.predict(x)
    text = (tmp_path / "out" / "README.txt").read_text()
    assert 'x.astype("float32")' in text
    (line,) = [line for line in text.splitlines() if "import Predictor" in line]
    exec(line.strip(), {})


class Inside(torch.nn.Module):
    """Where two vectors are inside a range, written with Python's operators."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((x > 0) & (y < 1) | (x < -1) ^ (y > 2)).float()


def test_a_graph_may_use_the_operators_of_python(tmp_path: Path) -> None:
    """Exports of MP-FedCL that an older version made do."""
    both = torch.linspace(-2, 2, 9), torch.linspace(3, -3, 9)
    torch.export.save(torch.export.export(Inside(), both), tmp_path / "model.pt2")
    (found,) = Program(tmp_path / "model.pt2")(*both)
    assert found.tolist() == Inside()(*both).tolist()
