"""Readings by name: every method in both presets, on all clients and on a tenth of them, and resumed."""

import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import final_state
from torch.utils._pytree import tree_leaves

from protofed.config.experiment import Experiment
from protofed.errors import UserError
from protofed.method import Method
from protofed.methods import METHODS
from protofed.runs.folder import RunFolder
from protofed.runs.loop import Interrupted, run
from protofed.runs.watch import Watch
from protofed.sweep import Sweep

ALL = {
    *("local", "fedavg", "fedprox", "fedper", "fedrep", "fesem", "ditto", "fedbabu", "fedrod", "creff"),
    *("fedproto", "fednh", "fedpr", "mpfedcl", "spfedcl", "dpfedcl"),
    *("classmeans", "lda", "qda", "ridge", "ccvr"),
    *("fedgh", "fedorgp", "fedpac", "fedtgp", "fpl", "moon"),
    *("fedproc", "fedpcl", "fedplvm", "i2pfl", "pfedfda", "gpfl"),
}


class StopAfterOne(Watch):
    def round(self, line: dict[str, object]) -> None:
        if line["round"] == 1:
            raise KeyboardInterrupt


def plan(method: str, *changes: str) -> Experiment:
    few = ["model=cnn_digits", "rounds=2", "clients=4", "local_epochs=1", "partition.shots=3"]
    few += ["evaluate.own=0", "evaluate.gm=0", "evaluate.pm=0", "record.enabled=false", "engine.threads=1"]
    quick = {"creff": ["method.head_epochs=3", "method.steps=3"], "fedrep": ["method.head_epochs=2"]}
    quick |= {"ccvr": ["method.virtual=5"], "fedtgp": ["method.server_epochs=2"]}
    return Experiment.load("demo", f"method={method}", *few, *quick.get(method, []), *changes)


def test_all_of_them_are_offered() -> None:
    assert set(METHODS) == ALL
    for name, kind in METHODS.items():
        assert set(kind.presets) - MORE.get(name, set()) == {"paper", "official"}


MORE = {"lda": {"gh_ofl", "fedcgs"}, "ridge": {"fed3r", "afl"}}  # where two papers are two readings of one method


def test_papers_that_are_readings_of_one_method_go_by_their_names() -> None:
    for name, one, other in (("lda", "gh_ofl", "fedcgs"), ("ridge", "fed3r", "afl")):
        assert METHODS[name].preset(one) == METHODS[name].preset("paper")
        assert METHODS[name].preset(other) == METHODS[name].preset("official")
        assert METHODS[name].preset(one) != METHODS[name].preset(other)


@pytest.mark.parametrize("who", [("participation=1.0",), ("clients=10", "participation=0.1")], ids=["all", "tenth"])
@pytest.mark.parametrize("preset", ["paper", "official"])
@pytest.mark.parametrize("method", sorted(ALL))
@pytest.mark.slow
def test_every_method_runs_in_both_presets_and_resumes(method: str, preset: str, who: tuple[str, ...]) -> None:
    experiment = plan(method, f"method.preset={preset}", *who)
    with pytest.raises(Interrupted):
        run(experiment, "cut", watch=StopAfterOne())
    run(experiment, "cut", resume=True)
    run(experiment, "whole")
    assert final_state(Path("cut")) == final_state(Path("whole"))
    state, _ = RunFolder(Path("whole")).restore()
    assert state is not None
    assert all(torch.isfinite(t).all() for t in tree_leaves(state.server) if t.is_floating_point())


# Every field of every method in both readings, written out: the default first, then what a reading has instead. Where
# no other source is named, "paper" is the method's own, and "official" is FedProto's or FedNH's code. The codes are
# FedProto's 97e42e2, FedNH's 60c3161, FedPCL's 0c3895b (for FedPR and MP-FedCL, which released none), FedRep's d82e629,
# FedBABU's e34c15b, CReFF's fbec98f, Ditto's 26d9b29 and FeSEM's e206681.
COMMON = {"init": "common", "inference": "head", "candidates": "all"}
POOL = {"inference": "proto", "temperature": 0.07, "unit": True, "weighting": "samples"}  # MP-FedCL, Eq. 11, Algs. 1, 2
POOL_READINGS = (
    {"unit": False},  # the text normalises nothing
    {"weighting": "uniform"},  # FedPCL's code: embeddings of length 1, a plain mean
)
GENERATED = {"server_lr": 0.01, "server_batch": 10}  # the clients' step and batch size
FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "local": ({"init": "per_client"}, {}, {"init": "common"}),  # FedNH's code reseeds before each client
    "fedavg": ({"weighting": "samples"}, {}, {"weighting": "uniform"}),  # Alg. 1: n_k / n; both codes: a plain mean
    "fedprox": (
        {"mu": 0.01, "weighting": "samples"},  # CReFF's code; the papers that compare with FedProx name no mu
        {},
        {"mu": 0.0, "weighting": "uniform"},  # the term of FedProto's code has no gradient
    ),
    "fedper": (
        {"private": ("head.",), "weighting": "samples"},
        {},
        {"weighting": "uniform"},  # FedNH's code: all but the last layer, a plain mean
    ),
    "fedrep": (
        {"head_epochs": 10, "last_head_epochs": 10, "weighting": "uniform"},  # the authors' code
        {},
        {"last_head_epochs": 0},  # FedNH's code ends with the last round
    ),
    "fesem": (
        {"centres": 3, "grouping": "em", "compare": "", "weighting": "samples"},  # the authors' code: by samples
        {"weighting": "uniform"},  # the paper's M-step: the mean of the members
        {"centres": 2, "grouping": "size", "weighting": "uniform"},  # FedProto's code: two groups by n_i < mean(n)
    ),
    "ditto": (
        {"lam": 1.0, "anchor": "received", "personal_epochs": 0, "plain": True, "clip": "whole"}
        | {"weighting": "uniform"},
        {},  # the authors' code
        # FedNH, App. A.2 (lam), and its code, which pulls towards the copy that was trained here and clips the gradient
        # of the cross-entropy alone
        {"lam": 0.75, "anchor": "trained", "clip": "loss"},
    ),
    "fedbabu": (
        {"tune_epochs": 5, "tune_lr": 0.0, "start": "global", "weighting": "uniform"},  # both codes, but for tune_lr
        {"tune_lr": 0.001},  # the authors' code
        {"start": "stale"},  # FedNH's code downloads nothing before it fine-tunes
    ),
    "fedrod": (
        {"personal": "linear", "plain": True, "clip_personal": True, "weighting": "uniform"},
        {"weighting": "samples"},
        {"personal": "hyper", "clip_personal": False},  # FedNH's code for its CNN, whose P-head loop does not clip
    ),
    "creff": (
        {"per_class": 100, "steps": 100, "feature_lr": 0.1, "head_epochs": 300, "head_lr": 0.01, "head_batch": 32}
        | {"real": 0, "draws": 1, "bias": "keep", "weighting": "samples"},
        {"real": 32, "draws": 10},  # the authors' code, which has the default's other numbers too
        # FedNH, App. A.2 (the step size), and its code
        {"feature_lr": 0.01, "head_batch": 64, "real": 64, "draws": 10, "bias": "drop", "weighting": "uniform"},
    ),
    "fedproto": (
        {"inference": "proto", "candidates": "own", "lam": 1.0, "distance": "mse", "pull": "sample"}
        | {"aggregation": "mean", "source": "clean", "absent": "keep", "scored_by": "newest"},
        {"candidates": "all", "distance": "l2", "pull": "prototype", "aggregation": "literal"},  # Eqs. 4, 8 and 6
        {"init": "per_client", "source": "inloop", "absent": "forget"},  # its code rebuilds prototypes every round
    ),
    "fednh": (
        {"rho": 0.9, "scale": 20.0, "train_scale": True, "start": "separated", "alpha": "counts"}
        | {"weighting": "uniform", "scored_by": "downloaded"},  # Alg. 1, l. 12, and its code: W^t
        {"scale": 30.0, "alpha": "uniform"},  # the text's s; Eq. 4 with alpha = 1/|S|, App. A.2
        {"scale": 1.0, "start": "orthogonal"},  # its code for Conv2Cifar, whose W has orthonormal rows
    ),
    "fedpr": (
        {"lam": 1.0, "distance": "mse", "divide": "samples", "weighting": "samples"},
        {"inference": "proto", "distance": "l2", "divide": "everyone"},  # Alg. 1, Eq. 4, Eq. 3 with its 1/N
        {"inference": "proto", "divide": "holders", "weighting": "uniform"},  # FedPCL's code
    ),
    "fedproc": (
        {"over": 100, "temperature": 0.5, "first": "classifier", "source": "clean", "weighting": "samples"},
        {},
        {"temperature": 1.0, "first": "contrast", "source": "inloop"},  # MarsFL's code 581283b; the authors have none
    ),
    "fedpcl": (
        {"inference": "proto", "temperature": 0.07, "projection": 256, "whole": True, "over_clients": "mean"}
        | {"judged_by": "own"},
        {"judged_by": "mean"},
        {"whole": False, "over_clients": "sum"},  # the authors' code 0c3895b
    ),
    "fedplvm": (
        {"lam": 100.0, "alpha": 0.25, "temperature": 0.07, "most": 10, "weighting": "samples"},  # utils/options.py
        {},
        {"weighting": "uniform"},  # the authors' code 867b5f1 with its default label_iid
    ),
    "i2pfl": ({"inter": 10.0, "intra": 1.0, "temperature": 0.07, "keep": 0.99, "weighting": "samples"}, {}, {}),
    "pfedfda": (
        {"betas": tuple(step / 10 for step in range(11)), "single": False, "ball": 1.0},
        {"ball": 1e-4},
        {},  # the authors' code 73c7c40 adds the unit matrix to a client's covariance
    ),
    "gpfl": (
        {"lam": 0.01, "mu": 0.1, "conditions": "received", "length": "sample"},
        {},
        {"conditions": "trained", "length": "batch"},  # PFLlib d832e76, by the same authors
    ),
    # The six that follow: the texts and command lines of their own authors.
    "fedgh": (
        {"server_epochs": 1, "server_lr": 0.01, "server_batch": 10, "scored_by": "own"},
        {},
        {"scored_by": "newest"},  # HtFLlib e959261: clients receive the head before they are tested
    ),
    "fedorgp": (GENERATED | {"align": 100.0, "together": 1.0, "orthogonal": 10.0, "server_epochs": 1}, {}, {}),
    "fedpac": (
        {"lam": 1.0, "head_epochs": 1, "head_lr": 0.1, "smallest": 0.0, "least": 0.001},
        {"least": 0.0},  # the text's problem as it stands
        {},  # the authors' code leaves out small weights
    ),
    "fedtgp": (
        GENERATED | {"inference": "proto", "lam": 1.0, "server_epochs": 100, "threshold": 100.0},
        {},
        {"lam": 10.0},  # the authors' command line
    ),
    "fpl": ({"contrast": 1.0, "pull": 1.0, "temperature": 0.02, "weighting": "samples"}, {}, {}),  # the authors' code
    "moon": ({"mu": 5.0, "temperature": 0.5, "projection": 256, "weighting": "samples"}, {}, {}),
    "mpfedcl": (POOL | {"clusters": 2, "steps": 20}, *POOL_READINGS),  # Table II: 2 for MNIST
    "spfedcl": (POOL, *POOL_READINGS),
    "classmeans": ({"distance": "euclidean"}, {}, {"distance": "cosine"}),  # Snell et al., Eq. 2; as CLIP-like codes do
    "lda": (
        {"covariance": "within", "shrinkage": 0.1, "prior": "counts", "personal": False}
        | {"betas": (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)},
        {"shrinkage": 0.05},  # GH-OFL's code ddfbae9, configs/cifar10.yaml
        {"covariance": "total", "shrinkage": 0.0},  # FedCGS's code 85681fe: about the mean of all, gamma 0
    ),
    "qda": (
        {"covariance": "full", "shrinkage": 0.05, "prior": "counts"},
        {},  # GH-OFL's code: GH-QDAfull
        {"covariance": "diagonal", "shrinkage": 0.0},  # GH-OFL's code: GH-NBdiag
    ),
    "ridge": (
        {"gamma": 1.0, "bias": False},
        {"gamma": 0.01, "bias": True},  # Fed3R's code c2a8e5d, configs/fed3r_gld.yml; the bias is penalised, too
        {"gamma": 0.0},  # AFL's code 1e7c2d9 with --clean_reg: the clients' rg is taken out again
    ),
    "ccvr": (
        {"virtual": 200, "head_epochs": 10, "head_lr": 0.01, "head_batch": 32, "start": "averaged"}
        | {"weighting": "samples"},
        {},  # Alg. 1; the authors released no code
        {"head_epochs": 1},  # FL-bench's code 01fb003: one pass over 200 of each class
    ),
    "dpfedcl": (POOL | {"eps": 0.0, "min_samples": 5, "most": 8}, *POOL_READINGS),  # the paper gives none of them
}


@pytest.mark.parametrize("method", sorted(ALL))
def test_a_preset_is_its_fields(method: str) -> None:
    usual, paper, official = FIELDS[method]
    assert asdict(METHODS[method]()) == COMMON | usual
    assert asdict(METHODS[method].preset("paper")) == COMMON | usual | paper
    assert asdict(METHODS[method].preset("official")) == COMMON | usual | official


@pytest.mark.parametrize("method", sorted(ALL))
@pytest.mark.parametrize("preset", ["paper", "official"])
def test_an_experiment_names_a_preset(method: str, preset: str) -> None:
    experiment = Experiment.load("demo", f"method={method}", f"method.preset={preset}")
    assert experiment.method == METHODS[method].preset(preset)
    assert Experiment.from_dict(experiment.to_dict()).method == experiment.method
    given = Experiment.load("demo", f"method={method}", f"method.preset={preset}", "method.inference=head")
    assert given.method.inference == "head"


def test_a_preset_leaves_the_files_own_fields_behind_but_not_those_beside_it() -> None:
    changed = Experiment.load("demo", "method.preset=official", "method.lam=0.5").method
    assert changed == METHODS["fedproto"].preset("official", lam=0.5)
    with pytest.raises(UserError, match=r"method.preset = 'papr' is unknown.*paper"):
        Experiment.load("demo", "method.preset=papr")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("method=fednh", "method.rho=1.5"), r"method.rho = 1.5 should be less than 1"),
        (("method=fednh", "method.rho=0.0"), r"method.rho = 0.0 should be greater than 0"),
        (
            ("method=mpfedcl", "method.clusters=9"),
            r"method.clusters = 9.*no client has more than \d samples of one class",
        ),
        (("method=fedavg", "model=['mlp_digits', 'cnn_digits']"), r"needs one architecture.*Use fedproto"),
        (("method=fednh", "method.start=orthogonal", "model.dim=4"), r"wide as there are classes.*'separated'"),
    ],
)
def test_what_a_method_cannot_serve_is_said_before_training(changes: tuple[str, ...], said: str) -> None:
    name = changes[0].removeprefix("method=")
    with pytest.raises(UserError, match=said):
        run(plan(name, *changes[1:]), "out")
    assert not Path("out").exists()


OWN = """from dataclasses import dataclass
from protofed.methods.local import Local
class Bare(Local):
    lam: float = 2.0
@dataclass(frozen=True)
class Open(Local):
    lam: float | None = None
@dataclass(frozen=True, kw_only=True)
class Asks(Local):
    lam: float
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Bare", r"has the field lam but is not a dataclass\. Write @dataclass\(frozen=True\) above the class"),
        ("Asks", r"its field lam has no default\. Give it one"),
    ],
)
def test_slips_in_a_method_of_ones_own_are_said(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(".")
    Path("method_with_slips.py").write_text(OWN)
    with pytest.raises(UserError, match=said):
        Experiment.load("demo", f"method=method_with_slips:{name}")


def test_a_field_that_is_none_by_default_is_left_out_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(".")
    Path("method_with_slips.py").write_text(OWN)
    plan = Experiment.load("demo", "method=method_with_slips:Open")
    assert Experiment.from_dict(tomllib.loads(plan.to_toml())) == plan
    assert "lam = 3.0" in Experiment.load("demo", "method=method_with_slips:Open", "method.lam=3.0").to_toml()


def test_a_method_without_presets_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(".")
    bare = "from protofed.methods.local import Local\nclass Bare(Local):\n    presets = {}\n"
    Path("method_without_presets.py").write_text(bare)
    name = "method_without_presets:Bare"
    with pytest.raises(UserError, match=r"method\.preset = 'paper': method_without_presets:Bare has no presets"):
        Experiment.load("demo", f"method={name}", "method.preset=paper")
    assert Method.presets == {}, "nor has one that says nothing about it"
    sweep = {"experiment": "demo", "methods": {name: [], "local": []}, "parameters": {"method.preset": ["paper"]}}
    with pytest.raises(UserError, match="none of method_without_presets:Bare has it"):
        Sweep.load({**sweep, "methods": {name: []}})
    own, local = Sweep.load(sweep).cells()
    assert "method.preset" in local.labels
    assert "method.preset" not in own.labels
