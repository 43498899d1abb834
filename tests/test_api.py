"""federate(): one's own models, data and labels in one call."""

import datetime
import enum
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import protofed
from protofed import UserError, federate
from protofed.data.readers.own import read_clients
from protofed.method import Method
from protofed.runs import saved
from protofed.runs.loop import Interrupted
from protofed.runs.watch import Watch

RNG = np.random.default_rng(0)
Y = np.tile(np.arange(3), 10)
PICTURES = np.ones((30, 1, 4, 4), np.float32)
X = (RNG.normal(size=(30, 6)) + 2 * Y[:, None]).astype(np.float32)
NAMES = np.array(["quince", "apple", "fig"])


class Net(nn.Module):
    def __init__(self, width: int = 8, out: int = 3) -> None:
        super().__init__()
        self.a, self.drop, self.out = nn.Linear(6, width), nn.Dropout(0.2), nn.Linear(width, out)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.drop(torch.relu(self.a(x)))
        return z, self.out(z)


class Encoder(nn.Module):
    """Counts how many samples it has seen."""

    seen = 0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.fc = nn.Linear(6, 8), nn.Linear(8, 1000)

    def forward(self, x: Tensor) -> Tensor:
        Encoder.seen += len(x)
        return self.fc(torch.relu(self.a(x)))


class Items(Dataset[Any]):
    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        if index == self.bad:
            raise OSError("the drive is gone")
        return torch.from_numpy(X[index]), str(NAMES[Y[index]])


class Tree(enum.Enum):
    ELM, ASH, OAK = range(3)


class Notes(Watch):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_one_call_from_module_and_odd_labels_to_models_prototypes_and_folder() -> None:
    net, watch = Net().eval(), Notes()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    clients = {"north": (X, NAMES[Y]), "south": Items(), "west": (X[Y > 0], NAMES[Y][Y > 0], X, NAMES[Y])}
    done = federate(net, clients, rounds=3, out="out", watch=watch, lam=0.5, lr=0.01, seed=3)
    assert done.labels == ["apple", "fig", "quince"]
    assert done.names == ["north", "south", "west"]
    assert done.folder == Path("out")
    assert done.metrics["accuracy_mean"] == done.accuracy
    assert len(done.rounds) == 3
    assert {label: tuple(row.shape) for label, row in done.prototypes.items()} == dict.fromkeys(done.labels, (8,))
    assert [type(model) for model in done.models] == [Net] * 3
    assert not torch.equal(done.models[0].a.weight, done.models[1].a.weight)
    assert done.models["south"] is done.models[1]
    assert list(done.accuracies) == done.names
    assert np.mean(list(done.accuracies.values())) == pytest.approx(done.accuracy)
    assert done.score(X, NAMES[Y], "west") == pytest.approx(done.accuracies["west"])  # whose test data this is
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())  # copied, never changed
    said = done.predict(X[:9], client="south")
    with torch.no_grad():
        z = done.models[1](torch.from_numpy(X[:9]))[0]
    rows = torch.stack([done.prototypes[label] for label in done.labels])
    assert said == [done.labels[place] for place in torch.cdist(z, rows).argmin(1)]  # the user can do it alone
    assert "quince" not in done.predict(X, client="west")  # which has never seen one
    assert any("in evaluation mode" in note for note in watch.notes)
    assert any("embedding = the input of layer out, 8 numbers" in note for note in watch.notes)
    kept = tomllib.loads(Path("out/experiment.toml").read_text())
    assert kept["model"]["name"] == "memory:test_api:Net"
    assert kept["data"]["name"].startswith("memory:")
    assert kept["method"]["lam"] == 0.5

    again = federate(net, clients, rounds=3, out="again", quiet=True, lam=0.5, lr=0.01, seed=3)
    assert all(map(torch.equal, done.models[2].parameters(), again.models[2].parameters()))
    with pytest.raises(UserError, match=r"out=out already holds a finished run\. Name another folder with out="):
        federate(net, clients, rounds=3, out="out", quiet=True, lam=0.5, lr=0.01, seed=3)
    resumed = federate(net, clients, rounds=3, out="out", quiet=True, lam=0.5, lr=0.01, seed=3, resume=True)
    assert resumed.accuracy == done.accuracy
    with pytest.raises(UserError, match=r"data.name 'memory:.*' -> 'memory:"):
        federate(net, [(X, Y), (X, Y), (X, Y)], rounds=3, out="out", quiet=True, lam=0.5, lr=0.01, seed=3, resume=True)
    with pytest.raises(UserError, match="was passed in by a script, and is not kept"):
        protofed.run(protofed.Experiment.load("out/experiment.toml"), "elsewhere")


def test_a_frozen_encoder_sees_every_sample_once() -> None:
    Encoder.seen = 0
    net = Encoder()
    weight = net.a.weight.clone()
    done = federate(net, [(X, Y)] * 2, rounds=4, out="out", quiet=True, frozen=True, head="linear", lr=0.05)
    assert Encoder.seen < 2 * len(X) + 60  # not 4 rounds of training and measuring on 60: a few to look into it
    assert torch.equal(done.models[0].a.weight, weight)
    assert type(done.models[0]) is Encoder
    assert not torch.equal(done.models[0].fc.head.weight, done.models[1].fc.head.weight)
    assert len(done.predict(X[:4])) == 4
    with pytest.raises(UserError, match="project = 64 behind a frozen encoder"):
        federate(net, [(X, Y)] * 2, "fednh", 1, out="nh", quiet=True, frozen=True, head="linear")


def test_widths_that_differ_are_refused_or_projected_and_a_global_model_is_given() -> None:
    models = [Net(8), Net(8), Net(12)]
    named = {3: (X, Y), 1: (X, Y), 0: (X, Y)}
    with pytest.raises(UserError, match=r"Net: 8, Net-2: 12.*project=64"):
        federate(models, [(X, Y)] * 3, rounds=1, out="out", quiet=True)
    watch = Notes()
    done = federate(dict(zip((0, 1, 3), models, strict=True)), named, rounds=1, out="out", watch=watch, project=5)
    assert [model.a.out_features for model in done.models] == [12, 8, 8]
    assert done.models[3] is next(iter(done.models))  # a client's name comes before its place
    assert {row.shape for row in done.prototypes.values()} == {(5,)}
    assert any("weights of its own module" in note for note in watch.notes)
    half = {"participation": 0.5}
    average = federate(Net, [(X, Y > 0)] * 2, "fedavg", 1, out="avg", quiet=True, settings=half, head="linear")
    assert type(average.global_model) is Net
    assert average.labels == [False, True]
    assert average.prototypes == {}


def test_tokens_go_through_an_embedding() -> None:
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.classifier = nn.Embedding(30, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.classifier(self.words(x).mean(1))}

    tokens = RNG.integers(0, 10, (30, 7)) + 10 * Y[:, None]
    bare = {"record": {"enabled": False}}
    torch.manual_seed(0)
    done = federate(Text(), [(tokens, Y)] * 2, rounds=15, out="out", quiet=True, lr=0.05, settings=bare)
    assert done.accuracy > 0.9
    assert done.models[0](torch.from_numpy(tokens))["logits"].argmax(1).tolist() == Y.tolist()


def read(clients: Any, **options: Any) -> Any:
    return read_clients(clients, test_fraction=0.2, seed=0, **options)


def test_every_form_of_data_is_read_alike() -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"features": X.tolist(), "label": NAMES[Y].tolist()}
    kinds = {"features": datasets.Sequence(datasets.Value("float32"))}
    classes = datasets.Features(kinds | {"label": datasets.ClassLabel(names=["apple", "fig", "quince"])})
    forms = [
        (X, NAMES[Y]), (torch.from_numpy(X), NAMES[Y].tolist()), (X.tolist(), NAMES[Y].astype(object)[:, None]),
        Items(), torch.utils.data.DataLoader(Items()), {"train": (X, NAMES[Y])}, {"x": X, "y": NAMES[Y]},
        datasets.Dataset.from_dict(rows),
        datasets.Dataset.from_dict(rows).cast(classes),
    ]  # fmt: skip
    own = read(forms)
    assert own.labels == ["apple", "fig", "quince"]
    for domain in own.domains:
        assert domain.x_train.dtype == np.float32
        assert (len(domain.y_train), len(domain.y_test)) == (24, 6)
        assert np.bincount(domain.y_test).tolist() == [2, 2, 2]  # class by class
    renamed = datasets.Dataset.from_dict({"kind": NAMES[Y].tolist(), "measures": X.tolist()})
    assert np.array_equal(read([renamed]).domains[0].x_train, own.domains[0].x_train)
    whole = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    (given,) = read([whole], tests=[(X[:4], Y[:4])]).domains
    assert (len(given.y_train), len(given.y_test)) == (30, 4)
    images = read([(np.zeros((6, 1, 4, 4), np.uint8), [7, -2] * 3)])
    assert images.domains[0].x_train.dtype == np.uint8
    assert images.labels == [-2, 7]
    days = [datetime.date(2020, 1, 1 + k) for k in Y]
    assert read([(X, days)]).labels == sorted(set(days))
    assert read([(X, [("a", int(k)) for k in Y])]).labels == [("a", 0), ("a", 1), ("a", 2)]
    assert read([(X, [Tree(k) for k in Y])]).labels == sorted(Tree, key=str)  # has no order of its own


def test_data_frames_are_read_as_numbers() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X)
    mixed = frame.assign(old=Y > 1)  # numpy would make objects of it
    (domain,) = read([(mixed, pandas.Series(Y))]).domains
    assert domain.x_train.dtype == np.float32
    assert sorted(domain.x_train[:, 6].tolist() + domain.x_test[:, 6].tolist()) == [0.0] * 20 + [1.0] * 10
    tokens = pandas.DataFrame({"a": Y, "b": Y}).astype("Int64")
    assert read([(tokens, Y)]).domains[0].x_train.dtype == np.int64
    with pytest.raises(UserError, match=r"client 0 is a DataFrame without labels. Give \(x, y\)"):
        read([frame])
    with pytest.raises(UserError, match=r"client 0: column 'town' holds .*, not numbers"):
        read([(frame.assign(town="here"), Y)])


@pytest.mark.parametrize(
    ("clients", "said"),
    [
        ([(X, Y + 0.5)], "client 0: the label at index 0 is 0.5. Labels are classes"),
        ([(X, np.where(Y == 1, np.nan, Y))], "client 0: the label at index 1 is NaN"),
        ([(X, np.eye(3)[Y])], r"labels have shape \(30, 3\).*argmax"),
        ([(X, Y), (X, NAMES[Y])], "labels are text with client 1 .* but numbers with client 0"),
        ([(X, Y), (X, Y > 0)], r"labels are numbers with client 0 \(0\) but booleans with client 1"),
        ([(X, Y, X, NAMES[Y])], r"text with client 0 \(test\) .* but numbers with client 0 "),
        ([(X, [[k] for k in Y])], r"client 0: the label at index 0 is \[.*0.*\]. Labels are classes"),
        ([[(X[0], 1, 2)] * 3], "client 0, sample 0 is tuple of 3, not a pair of input and label"),
        ([(X, Y), X], r"client 1 is an array of shape \(30, 6\) without labels. Give \(x, y\)"),
        ([(X, Y), (X, Y, X)], "client 1 is a tuple of 3. Give .* or .*x_test, y_test"),
        ([{"trian": (X, Y)}], "client 0 is a dict with the keys trian. Give"),
        ([(X, Y), (X[:5], Y)], "client 1 has 5 samples but 30 labels"),
        ([(X, Y), (X[:0], Y[:0])], "client 1 has no samples. Leave it out"),
        ([(X, Y), (X * np.inf, Y)], "client 1: sample 0 holds NaN or infinite values"),
        ([(PICTURES, Y), (PICTURES * np.nan, Y)], "client 1: sample 0 holds NaN or infinite values"),
        ([(X, Y, X[:, :4], Y)], r"training samples have shape \(6,\), test samples \(4,\)"),
        ([([[1.0, 2.0], [1.0]], [0, 1])], r"client 0: sample 1 has shape \(1,\), sample 0 \(2,\)"),
        ([(["good", "bad"], [0, 1])], "samples are text"),
        ([(X, Y * 0)], "only one class"),
        ([Items(), Items(bad=7)], "client 1: reading sample 7 of its data set raises OSError: the drive is gone"),
        ((X, Y), "clients is tuple"),
        ([], "clients is empty"),
        ([7], "client 0: its data is int"),
    ],
)
def test_bad_data_is_refused_in_one_line(clients: Any, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        read(clients)
    assert "\n" not in str(caught.value)


def test_missing_values_are_said_before_a_layer_is_looked_for() -> None:
    holed = X.copy()
    holed[0, 0] = np.nan  # among the first samples, with which layers are looked for
    with pytest.raises(UserError, match=r"^north: sample \d holds NaN, a missing value.*WithMask.*\(Net\)"):
        federate(Net(), {"north": (holed, Y), "south": (X, Y)}, rounds=1, quiet=True, test_fraction=0)


def test_what_is_odd_but_allowed_is_said() -> None:
    with pytest.raises(
        UserError, match=r"client 0: the label at index 2 is 2, which is not among the classes \[0, 1\]"
    ):
        read([(X, Y)], labels=[0, 1])
    own = read([(X[Y == 0], Y[Y == 0]), (100 * X[Y == 1], Y[Y == 1])], labels=[0, 1, 2])
    assert any("no class in common with any other client: client 0, client 1" in note for note in own.notes)
    assert any("nobody has training samples of 2" in note for note in own.notes)
    assert any("inputs of client 1 reach beyond 50" in note for note in own.notes)
    assert any("only one training sample: client 0 of 9" in n for n in read([(X, [9, *Y[1:]])]).notes)


@pytest.mark.parametrize(
    ("models", "options", "said"),
    [
        ([Net(), Net()], {}, "models has 2 entries, clients has 1"),
        (Net(out=7), {}, "client 0: Net: its layer 'out' gives 7 numbers for each sample, but there are 3 classes"),
        (Net(), {"method": "fedprot"}, "Did you mean 'fedproto'"),
        (Net(), {"lamm": 2}, "unknown key method.lamm = 2. Did you mean 'lam'"),
        (Net(), {"rnds": 2}, "federate has no argument 'rnds'. Did you mean 'rounds'"),
        (Net(), {"settings": {"rounds": 3}}, "settings has 'rounds', which is an argument of federate"),
        (Net(), {"batch_size": 0}, r"batch_size = 0 should be greater than or equal to 1\.$"),  # not the file's default
        (Net(), {"seed": -1}, "seed = -1 should be a whole number of at least 0"),
        (Net(), {"lr": "much"}, "optimizer.lr = 'much'"),
        (7, {}, "the model of client 0 is int"),
        (Net(), {"participation": 0.5}, "federate has no argument 'participation'. Give it in settings, as in .*: 0.5"),
        (Net(), {"local_epochs": 2}, "federate has no argument 'local_epochs'. Did you mean 'epochs'"),
        (Net(), {"momentum": 0.9}, "federate has no argument 'momentum'. Give it in optimizer"),
        (Net(), {"optimizer": torch.optim.Adam}, "optimizer is Adam. Give 'adam', 'sgd', or a dict"),
        (Net(), {"settings": ["rounds"]}, "settings is list. Give a dict"),
        (Net(), {"watch": "loss"}, "watch is str"),
        (Net(), {"labels": "abc"}, "labels = 'abc' is text. Give a list of all classes"),
        (Net(), {"method": Method}, "method = Method is not a method: .* and defines aggregate, init_server"),
        ({"south": Net()}, {}, "do not have the same names: client 0, south is in one of them only"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(models: Any, options: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        federate(models, [(X, Y)], out="out", quiet=True, **options)
    assert not Path("out").exists()


class Reader(nn.Module):
    """Recurrent, with attention that drops weights, in every way what torch.vmap cannot take."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn = nn.Embedding(30, 6), nn.LSTM(6, 8, batch_first=True)
        self.mix, self.head = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.head(self.mix(self.rnn(self.words(x))[0]).mean(1))
        return mixed


def test_a_text_model_is_trained_by_a_method_that_never_embeds_and_exported() -> None:
    """Labels are odd numbers; the files agree with the result, and fit the user's own class."""
    runtime, watch = pytest.importorskip("onnxruntime"), Notes()
    tokens = RNG.integers(0, 10, (30, 5)) + 10 * Y[:, None]
    done = federate(Reader(), [(tokens, 7 * Y), (tokens, 7 * Y)], "fedper", 2, out="out", watch=watch, lr=0.01)
    assert "one client after another, not stacked: recurrent layers (LSTM, GRU)" in watch.notes
    about = done.export("exported", client="client 1")
    scores = runtime.InferenceSession("exported/model.onnx").run(["scores"], {"x": tokens})[0]
    assert [int(about["class_names"][place]) for place in scores.argmax(1)] == done.predict(tokens, client=1)
    own = Reader().eval()
    own.load_state_dict(load_file("exported/model.safetensors"))
    assert np.abs(own(torch.from_numpy(tokens)).detach().numpy() - scores).max() < 1e-4
    with pytest.raises(UserError, match=r"^there is no client 2. Known: client 0, client 1.$"):
        done.export("other", client=2)
    tokens[17, 2] = 30
    with pytest.raises(UserError, match=r"^b: Reader cannot.*Token ids go from 0 to 30: its nn.Embedding needs a row"):
        federate(Reader(), {"b": (tokens, Y), "c": (tokens, Y)}, quiet=True)


def test_what_is_frozen_is_exported_whole() -> None:
    done = federate(Net(), [(X, Y)] * 2, rounds=2, out="out", quiet=True, frozen=True, project=4)
    about = done.export("exported", client=1, onnx=False)
    net = torch.export.load("exported/model.pt2").module()
    _, scores, distances = net(torch.from_numpy(X))
    assert [int(about["class_names"][place]) for place in distances.argmin(1)] == done.predict(X, client=1)
    assert torch.allclose(done.models[1](torch.from_numpy(X))[1], scores, atol=1e-5)
    assert load_file("exported/model.safetensors").keys() == done.models[1].state_dict().keys()
    with pytest.raises(UserError, match="project = 64 behind a frozen encoder"):
        federate(Net(), [(X, Y)] * 2, "fedper", quiet=True, frozen=True)


def test_modules_in_memory_are_held_out_and_join_after_the_last_round() -> None:
    """The newcomer starts from the module that was handed in for it."""
    few = {"held_out_clients": 1, "join": {"steps": 5}, "record": {"enabled": False}}
    nets = [Net(), Net(), Net()]
    done = federate(nets, dict.fromkeys("abc", (X, Y)), rounds=1, out="out", quiet=True, settings=few)
    assert done.metrics["held_out_clients"] == 1
    assert 0 <= done.metrics["held_out_proto_mean"] <= 1
    new = protofed.join("out", data=(X, Y), model=Net(), shots=4, steps=5)  # without a file
    assert type(new.model) is Net
    said = new.model(torch.from_numpy(new.newcomers.domains[0].x_test))[1].argmax(1).numpy()
    assert (said == new.newcomers.domains[0].y_test).mean() == pytest.approx(new.mean("head"))
    with pytest.raises(UserError, match="the newcomer: the label at index 1 is '3', which is not among the classes "):
        protofed.join("out", data=(X, Y + 2), model=Net())
    (absent,) = set("abc") - set(done.accuracies)
    assert torch.equal(done.models["abc".index(absent)].a.weight, nets["abc".index(absent)].a.weight)
    with pytest.raises(UserError, match=f"^{absent} was held out of training and has no model"):
        done.predict(X, absent)


def test_slips_are_said_in_one_line_and_no_test_data_is_no_accuracy() -> None:
    watch = Notes()
    done = federate(Net(), [(X, Y)] * 2, rounds=1, out="out", watch=watch, test_fraction=0)
    assert np.isnan(done.accuracy)
    assert "no test data" in repr(done)
    assert any("takes 1 training steps in all" in note for note in watch.notes)
    with pytest.raises(UserError, match=r"x has shape \(30, 5\), but client 0 was trained on \(samples, 6\)"):
        done.predict(X[:, 1:])
    with pytest.raises(UserError, match=r"x has shape \(6,\), .* of one sample, x\[None\]"):
        done.predict(X[0])
    with pytest.raises(UserError, match=r"there is no client 9\. Known: 0 to 1"):
        done.models[9]
    with pytest.raises(UserError, match=r"^client=global: fedproto has no global model"):
        done.export("exported", "global", onnx=False)
    with pytest.raises(UserError, match="Did you mean 'epochs'"):
        federate(Net(), [(X, Y)] * 2, epoch=2)
    with pytest.raises(UserError, match=r"text with client 0 \('fig'\) but numbers with client 1 \(0\)"):
        federate(Net(), [(X, ["fig"] * 30), (X, Y)])


def test_a_result_shows_no_sample_and_no_weight_when_it_is_printed() -> None:
    done = federate(Net(), [(X, Y)] * 2, rounds=1, out="out", quiet=True, seed=0)
    joined = protofed.join("out", data=(X, Y), model=Net(), shots=4, steps=2)
    said = [repr(joined), repr(joined.joined), repr(joined.newcomers), repr(joined.newcomers.domains), repr(done)]
    said += [repr(done.prototypes), repr(read_clients([(X, Y)], test_fraction=0.2, seed=0))]
    said += [repr(done._prepared), repr(protofed.Result(done.folder, done.metrics)), repr(done._state)]
    said += [repr(saved.read_checkpoint(done.folder)), repr(done._prepared.reference.federation.train(0))]
    for text in said:
        assert "tensor(" not in text
        assert "array(" not in text
    assert repr(joined).startswith("<Joining: joined fedproto after round 1, 1 seed, accuracy ")
    assert all(len(text) < 400 for text in said[:3])


def test_a_missing_prototype_is_said_in_words() -> None:
    done = federate(Net(out=4), [(X, NAMES[Y])] * 2, rounds=1, quiet=True, labels=[*NAMES, "pear"])
    assert done.prototypes["fig"].shape == (8,)
    assert done.prototypes.get("pear") is None
    with pytest.raises(UserError, match=r"no prototype of 'pear': no client that took part sent one"):
        done.prototypes["pear"]
    with pytest.raises(UserError, match=r"there is no class 7\. Known: apple, fig, quince\."):
        done.prototypes[7]
    without = federate(Net(), [(X, Y)] * 2, "local", 1, quiet=True)
    with pytest.raises(UserError, match=r"^local has no global prototypes"):
        without.prototypes[0]


@pytest.mark.parametrize(
    ("out", "why"),
    [("file/run", "lies under .*file, which is a file"), ("/proc/here", "out= ?/proc/here"), ("n" * 300, "File name")],
)
def test_a_place_where_nothing_can_be_written_is_one_line(out: str, why: str) -> None:
    Path("file").touch()
    with pytest.raises(UserError, match=f"{why}.*Name another folder"):
        federate(Net(), [(X, Y)] * 2, rounds=1, quiet=True, out=out)


def test_a_path_that_is_none_and_an_export_under_a_file_are_one_line() -> None:
    with pytest.raises(UserError, match=r"out is int. Give the path of a folder"):
        federate(Net(), [(X, Y)] * 2, out=7)
    done = federate(Net(), [(X, Y)] * 2, rounds=1, quiet=True)
    Path("file").touch()
    with pytest.raises(UserError, match=r"^out=file/here lies under .*file, which is a file"):
        done.export("file/here", onnx=False)
    with pytest.raises(UserError, match=r"^out=file already exists"):
        done.export("file", onnx=False)


def test_quiet_and_refused_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    with pytest.raises(UserError, match="7 numbers"):
        federate(Net(out=7), [(X, Y)] * 2, quiet=True)
    assert not list((tmp_path / "scratch").iterdir())


def test_a_federation_that_was_stopped_says_how_to_go_on() -> None:
    class Stopper(Watch):
        def round(self, line: dict[str, Any]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(
        Interrupted, match=r"^stopped after round \d of 3\. Go on with out='(.*)', resume=True"
    ) as caught:
        federate(Net(), [(X, Y)] * 2, rounds=3, watch=Stopper(), seed=4)
    folder = str(caught.value).split("'")[1]
    assert federate(Net(), [(X, Y)] * 2, rounds=3, out=folder, resume=True, quiet=True, seed=4).rounds[-1]["round"] == 3


def test_quiet_without_a_folder_leaves_none() -> None:
    done = federate(Net(), [(X, Y)] * 2, rounds=1, quiet=True)
    folder = done.folder
    assert not Path("runs").exists()
    assert done.accuracies.keys() == {"client 0", "client 1"}
    done.export("exported", onnx=False)
    del done
    assert not folder.exists()
    assert list(Path().iterdir()) == [Path("exported")]


def test_labels_that_are_hardly_classes_are_doubted() -> None:
    class Fruit:
        """Told apart by identity alone."""

    def notes(labels: list[Any]) -> list[str]:
        return read_clients([(X, labels)], test_fraction=0, seed=0).notes

    (told, *_) = notes([Fruit() for _ in range(30)])
    assert (
        "labels are objects of the class Fruit, and each counts as a separate class (30 classes in 30 samples)" in told
    )
    (told, *_) = notes([f"file-{number}.png" for number in range(30)])
    assert told.startswith("there are 30 classes in 30 samples. Are the labels classes, such as 'file-0.png'?")
    assert not notes(Y.tolist())
    kinds = enum.Enum("Kinds", "a b c")
    assert not notes([list(kinds)[label] for label in Y])


def test_notes_call_clients_by_their_names() -> None:
    watch = Notes()
    empty = (X[:0], Y[:0])
    federate(Net(), {"north": (X, Y), "south": (X, Y)}, rounds=1, test={"north": (X, Y), "south": empty}, watch=watch)
    assert "1 of 2 clients have no test sample (south)." in watch.notes
    with pytest.raises(UserError, match=r"^the model of south is int"):
        federate({"north": Net(), "south": 3}, {"north": (X, Y), "south": (X, Y)}, quiet=True)
    with pytest.raises(UserError, match=r"^the loss of north \(and 1 more\) is no longer a number"):
        federate(Net(), {"north": (X, Y), "south": (X, Y)}, rounds=3, quiet=True, optimizer="sgd", lr=1e30)
