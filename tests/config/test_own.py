"""Models, data and methods of the user's own by import path, on the command line; and the pages that explain them."""

import sys
from pathlib import Path

import pytest
from checkout import ROOT
from command import protofed

from protofed import Experiment, UserError, run
from protofed.config.registry import find_method, name_of
from protofed.runs import setup as preparing
from protofed.runs.folder import RunFolder
from protofed.runs.setup import prepare
from protofed.sweep import Sweep, run_cells
from protofed.sweep.workers import Placed

DOCS = ROOT / "docs"

NETS = """
import torch
from torch import nn

class MyNet(nn.Module):
    def __init__(self, num_classes, width=16):
        super().__init__()
        self.a, self.drop, self.out = nn.Linear(4, width), nn.Dropout(0.1), nn.Linear(width, num_classes)

    def forward(self, x):
        return {"logits": self.out(self.drop(torch.relu(self.a(x))))}

def broken():
    raise OSError("the weights are gone")

number = 3
"""
DATA = """
import numpy as np

def load(parts=3, bad=False):
    if bad:
        raise OSError("no such drive")
    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    x = rng.normal(size=(60, 4)) + 2 * y[:, None]
    return {f"site {i}": (x[i::parts][:15], [("a", "b", "c")[k] for k in y[i::parts][:15]]) for i in range(parts)}

def tokens():
    rng = np.random.default_rng(0)
    return rng.integers(0, 9, (40, 4)), np.arange(40) % 2
"""
METHODS = """
from dataclasses import dataclass
from protofed.methods.fedproto import FedProto

@dataclass(frozen=True)
class Mine(FedProto):
    \"\"\"FedProto by another name.\"\"\"
    power: float = 0.5
    \"\"\"A power.\"\"\"
"""
EXPERIMENT = """
rounds = 2
clients = 4
method = "my_methods:Mine"
partition = "domain"
model = {name = "my_nets:MyNet", width = 8}
data = {name = "my_data:load", options = {parts = 4}}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files of one's own, in which one works."""
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "my_nets.py": NETS, "my_data.py": DATA, "my_methods.py": METHODS, "own.toml": EXPERIMENT,
    }.items():  # fmt: skip
        Path(name).write_text(text)
        sys.modules.pop(name.removesuffix(".py"), None)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(Path.cwd()))])
    return tmp_path


def test_model_data_and_method_by_import_path(own: Path) -> None:
    plan = Experiment.load("own.toml")
    assert plan.method.power == 0.5
    done = run(plan, "out")
    records = Path("out/clients.jsonl").read_text().splitlines()
    assert len(records) == 4
    assert '"domain": "site 3"' in records[3]
    again = Experiment.from_dict(RunFolder(Path("out")).experiment_dict())  # all that join and export go by
    assert again == plan
    assert run(again, "out", resume=True).summary == done.summary
    state, _ = RunFolder(Path("out")).restore()
    assert state is not None
    module = prepare(again).personal(2, state.clients[2])
    assert type(module).__name__ == "MyNet"
    assert set(module.state_dict()) == {"a.weight", "a.bias", "out.weight", "out.bias"}
    assert bool((module.a.weight == state.clients[2].params["body.net.a.weight"]).all())


@pytest.mark.slow
def test_every_command_takes_them(own: Path) -> None:
    for words, said in {
        "partition own.toml --out p": "per_class: a 16, b 16, c 16",
        "explain my_methods:Mine --experiment own.toml": "FedProto by another name.",
        "compare local my_methods:Mine --experiment own.toml rounds=1 --out c": "my_methods:Mine",
        "list methods": "fedproto",
    }.items():
        done = protofed(*words.split())
        assert done.returncode == 0, done.stderr
        assert said in done.stdout, done.stdout
    cells = Sweep.load({"experiment": "own.toml", "methods": {"mine": ["method=my_methods:Mine", "method.power=1.0"]}})
    (outcome,) = run_cells([Placed(cell, Path("s")) for cell in cells.cells()], jobs=1)
    assert outcome.summary is not None, outcome
    assert outcome.summary["method"] == "my_methods:Mine"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model=my_nets:MyNit", "my_nets has no MyNit"),
        ("model=my_nots:MyNet", "there is no module my_nots"),
        ("model=my_nets:number", "is int, not a class or a function"),
        ("model=my_nets:broken", r"raises OSError: the weights are gone, my_nets.py line 14"),
        ("model.widht=3", "unknown key model.widht = 3. Did you mean 'width'"),
        ("model.embedding=b", "MyNet has no such layer. It has: a"),
        ("model.head=a", "its layer 'a' gives 8 numbers for each sample, but there are 3 classes"),
        ("data=my_data:lod", "my_data has no lod"),
        ("data.options.bad=true", "raises OSError: no such drive"),
        ("data.options.part=3", "raises TypeError"),
        ("data.size=8", "data.size and data.channels are not for"),
        ("method=my_methods:FedProt", "has no FedProt"),
        ("method=my_nets:MyNet", "is not a method"),
        ("method=fedprotto", "Did you mean 'fedproto'"),
        ("method.pow=1", "unknown key method.pow = 1. Did you mean 'power'"),
    ],
)
def test_mistakes_are_one_line(own: Path, change: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        preparing.prepare(Experiment.load("own.toml", change))
    assert "\n" not in str(caught.value)


def test_whole_numbers_are_tokens_for_models_of_ones_own_alone(own: Path) -> None:
    keys = ["data=my_data:tokens", "data.options={}", "partition=iid", "clients=2", "method=fedavg"]
    floats = prepare(Experiment.load("own.toml", *keys, "model=mlp_digits")).engine
    tokens = prepare(Experiment.load("own.toml", *keys)).engine
    assert floats.reference.federation.train(0).x.dtype.is_floating_point
    assert not tokens.reference.federation.train(0).x.dtype.is_floating_point  # MyNet gets them as floats all the same


def test_an_entry_point_is_a_name(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = own / "offers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[protofed.methods]\nmine = my_methods:Mine\nlost = my_methods:Nothing\n")
    monkeypatch.syspath_prepend(str(own))
    kind = find_method("mine")
    assert name_of(kind) == "mine"
    assert Experiment.load("own.toml", "method=mine").to_dict()["method"]["name"] == "mine"
    listed = protofed("list", "methods").stdout
    assert "FedProto by another name." in listed
    assert "lost" not in listed  # one that cannot be loaded hides no other
