"""Secure sums in whole simulated runs: on every engine, with every method of Means, resumed, attacked and refused."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import StopAfter
from torch.utils._pytree import tree_leaves

from protofed import Experiment, UserError, run
from protofed.engines.wire import encode
from protofed.explain.explain import explain
from protofed.methods import METHODS
from protofed.runs.folder import RunFolder, State
from protofed.runs.loop import Interrupted, Watch

pytest.importorskip("cryptography", reason="needs cryptography: pip install 'protofed[secure]'")
pytest.importorskip("Crypto", reason="needs pycryptodome: pip install 'protofed[secure]'")

SMALL = (
    "clients=5", "rounds=2", "model=mlp_digits", "local_epochs=1", "engine=reference", "record.enabled=false",
    "device=cpu", "evaluate.own=0", "evaluate.pm=0", "partition.shots=4", "partition.spread=1",
)  # fmt: skip
SECURE = "privacy.secure_sum=true"
SINGLY = (
    *("fesem", "mpfedcl", "spfedcl", "dpfedcl", "fedgh", "fedorgp", "fedpac", "fedtgp", "fpl"),
    *("fedpcl", "fedplvm", "i2pfl"),
)
ONCE = ("classmeans", "lda", "qda", "ridge")  # they add up statistics and minimise nothing


class Told(Watch):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def small(*overrides: str) -> Experiment:
    return Experiment.load("demo", *SMALL, *overrides)


def state_of(folder: Path) -> State:
    state, remarks = RunFolder(folder).restore()
    assert state is not None
    assert not remarks
    return state


def difference(first: Path, second: Path) -> float:
    pairs = zip(tree_leaves(state_of(first).server), tree_leaves(state_of(second).server), strict=True)
    return max((float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel()), default=0.0)


@pytest.mark.parametrize("method", sorted(set(METHODS) - set(SINGLY)))
def test_every_method_of_means_gives_what_the_plain_sum_gives_up_to_the_grid(method: str, tmp_path: Path) -> None:
    plain = run(small(f"method={method}", "rounds=1"), tmp_path / "plain")
    secure = run(small(f"method={method}", "rounds=1", SECURE, "privacy.bits=48"), tmp_path / "secure")
    assert difference(tmp_path / "plain", tmp_path / "secure") < 2e-5
    losses = secure.rounds[0]["loss"], plain.rounds[0]["loss"]
    assert losses == (None, None) if method in ONCE else losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert secure.rounds[0]["params_up"] == plain.rounds[0]["params_up"]


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_engines_sum_securely_and_alike_and_bits_say_how_exactly(engine: str, tmp_path: Path) -> None:
    plan = ("method=fednh", "participation=0.8", f"engine={engine}")
    run(small(*plan), tmp_path / "plain")
    errors = {}
    for bits in (24, 32, 64):
        folder = tmp_path / str(bits)
        run(small(*plan, SECURE, f"privacy.bits={bits}", "privacy.range=16"), folder)
        errors[bits] = difference(tmp_path / "plain", folder)
    assert errors[24] > errors[32]
    assert errors[24] < 2e-2
    assert errors[32] < 1e-4
    assert errors[64] < 1e-5


def test_a_run_is_the_same_each_time_and_when_it_is_resumed(tmp_path: Path) -> None:
    plan = small("method=fedavg", SECURE, "rounds=3")
    run(plan, tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(plan, tmp_path / "again", watch=StopAfter(1), checkpoint_seconds=0)
    run(plan, tmp_path / "again", resume=True)
    assert encode(state_of(tmp_path / "whole").server, whole=True) == encode(state_of(tmp_path / "again").server, True)


def test_bytes_of_a_round_are_those_of_the_protocol(tmp_path: Path) -> None:
    line = run(small("method=fedproto", "rounds=1", SECURE), tmp_path / "run").rounds[0]
    plain = run(small("method=fedproto", "rounds=1"), tmp_path / "plain").rounds[0]
    numbers = 10 * 32 + 10 + 2 + 5  # totals, weights, the loss, how many were cut, and four checks
    assert line["bytes_up"] == 5 * (32 + 16 + 4 * numbers + 16) + 20 * (48 + 16)
    assert line["bytes_down"] - plain["bytes_down"] == 5 * (5 * 32 + 2) + 20 * 48


def test_numbers_beyond_the_range_are_cut_and_it_is_said(tmp_path: Path) -> None:
    told = Told()
    run(small("method=fedavg", "rounds=1", SECURE, "privacy.range=0.01"), tmp_path / "run", watch=told)
    (note,) = [text for text in told.notes if "privacy.range" in text]
    assert "were beyond privacy.range = 0.01 and were cut" in note
    assert all(float(leaf.abs().max()) <= 0.021 for leaf in tree_leaves(state_of(tmp_path / "run").server))


def test_attackers_lie_within_the_sum(tmp_path: Path) -> None:
    plan = ("method=fedavg", "rounds=1", "attack.kind=sign_flip", "attack.share=0.2", "privacy.bits=48")
    run(small(*plan), tmp_path / "plain")
    run(small(*plan, SECURE), tmp_path / "secure")
    run(small("method=fedavg", "rounds=1"), tmp_path / "honest")
    assert difference(tmp_path / "plain", tmp_path / "secure") < 2e-5
    assert difference(tmp_path / "honest", tmp_path / "secure") > 1e-3


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("method=mpfedcl",), "mpfedcl sends something that the server must see client by client. Use a method that"),
        (("method=fesem",), "such as fedproto, fednh, fedpr or fedavg"),
        (("robust.rule=median",), "robust.rule = 'median' compares the uploads of single clients"),
        (("robust.rule=clip",), "robust.rule = 'clip' compares the uploads of single clients"),
        (("privacy.threshold=6",), "privacy.threshold = 6, but a round has 5 clients"),
        (("privacy.threshold=2",), "privacy.threshold = 2 is not more than half of a round's 5 clients"),
        (("participation=0.2",), "a round has one client, whose upload is the sum"),
    ],
)
def test_what_cannot_be_summed_is_refused_in_a_line_before_anything_is_written(
    overrides: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        run(small(SECURE, *overrides), tmp_path / "run")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("key", "value"), [("bits", 7), ("range", 0), ("threshold", -1), ("secure_sum", 3)])
def test_keys_out_of_their_range_are_refused(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"privacy.{key}"):
        small(f"privacy.{key}={value}")


def test_without_the_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("protofed.runs.securesum.find_spec", lambda name: None if name == "Crypto" else found(name))
    with pytest.raises(UserError, match="needs pycryptodome, which is not installed"):
        run(small(SECURE), tmp_path / "run")


def test_experiments_without_secure_sums_keep_their_files() -> None:
    assert "privacy" not in small().to_dict()
    assert small(SECURE).to_dict()["privacy"] == {"secure_sum": True}


def test_a_sum_does_not_move_tensors_off_their_type(tmp_path: Path) -> None:
    run(small("method=fedavg", "rounds=1", SECURE), tmp_path / "run")
    assert {leaf.dtype for leaf in tree_leaves(state_of(tmp_path / "run").server)} == {torch.float32}


def test_explain_says_what_the_server_sees_with_and_without_secure_sums() -> None:
    plain, secure = (explain(small("method=fedproto", "rounds=1", *more)) for more in ((), (SECURE,)))
    assert {group["seen"] for group in plain["up"]["groups"]} == {"seen singly, then summed"}
    assert {group["seen"] for group in secure["up"]["groups"]} == {"only in the sum over at least 4 clients"}
    assert "it receives every upload singly" in " ".join(plain["private"]["server_learns"])
    learnt = " ".join(secure["private"]["server_learns"])
    assert "no sum of fewer than 4 clients can be opened" in learnt
    assert "single" not in learnt.replace("nothing about a single client", "")
    run(small("method=fedproto", "rounds=1", SECURE), "run")
    assert secure["up"]["bytes"]["round"] == RunFolder(Path("run")).rounds()[0]["bytes_up"]
