"""`protofed explain`: its numbers are those of a real run, and it says what is sent, kept and chosen."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from typer.testing import CliRunner

from protofed import Experiment, run
from protofed.cli import app
from protofed.config.schema import fields
from protofed.errors import UserError
from protofed.explain.explain import explain
from protofed.explain.messages import ALONE, cover
from protofed.methods import METHODS

SMALL = ["clients=4", "rounds=2", "partition.shots=3", "partition.spread=1", "batch_size=4", "engine.threads=1"]
ONE = "model=cnn_digits"
HALF = ["clients=6", "participation=0.5"]
DROP = ["partition.shots=2", "batch_size=5", "drop_last=true"]  # the last epoch leaves out one client's class
KEYS = {"method", "paper", "losses", "phases", "up", "down", "private", "choices"}


def told(*words: str) -> dict[str, Any]:
    method, *overrides = words
    return explain(Experiment.load("demo", f"method={method}", *SMALL, *overrides))


def shown(*words: str) -> str:
    done = CliRunner().invoke(app, ["explain", *words])
    assert done.exit_code == 0, done.output
    return done.output


CASES = {
    "fedproto": [],  # three architectures
    "fedproto official": ["method.preset=official", *HALF],
    "fedproto official dropping": ["method.preset=official", *DROP, *HALF],
    "fedproto paper": ["method.preset=paper"],
    "fedavg": [ONE, *HALF],
    "fednh": [ONE],
    "fedrod": [ONE],
    "mpfedcl": [ONE, *HALF],
    "fesem": [ONE, *HALF],
    "local": [],
}


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_a_run(case: str) -> None:
    plan = Experiment.load("demo", f"method={case.split()[0]}", *SMALL, *CASES[case], "evaluate.own=0", "evaluate.gm=0")
    first, second = run(plan, "out").rounds
    found = explain(plan)
    assert found["up"]["bytes"]["round"] == first["bytes_up"]
    assert found["up"]["numbers"]["round"] == first["params_up"]
    assert found["up"]["clients"] == first["clients"]
    assert found["down"]["bytes"]["round"] == second["bytes_down"]


def test_a_class_that_the_last_epoch_leaves_out_is_not_sent() -> None:
    whole = told("fedproto", "method.preset=official", *DROP, *HALF, "drop_last=false")
    assert (
        told("fedproto", "method.preset=official", *DROP, *HALF)["up"]["bytes"]["round"] < whole["up"]["bytes"]["round"]
    )


def test_a_run_of_one_round_gets_the_first_message() -> None:
    plan = Experiment.load("demo", *SMALL, "rounds=1")
    assert explain(plan)["down"]["round"] == 1
    assert explain(plan)["down"]["bytes"]["round"] == run(plan, "out").rounds[0]["bytes_down"]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_in_both_readings(name: str) -> None:
    quick = ["method.steps=2", "method.head_epochs=1"] if name == "creff" else []
    for reading in ("paper", "official"):
        found = told(name, f"method.preset={reading}", ONE, *quick)
        assert set(found) >= KEYS
        assert json.loads(json.dumps(found))["method"] == name
        assert found["paper"]
        assert found["losses"]
        assert found["phases"] or not METHODS[name]().phases()
        for way in ("up", "down"):
            message = found[way]
            groups, beside = message["groups"], message["bytes_beside"]["round"]
            assert sum(g["bytes"]["round"] for g in groups) + beside == message["bytes"]["round"], "it adds up"
            counted = sum(g["numbers"]["round"] for g in groups if g["kind"] not in ("buffers", "flags"))
            assert counted == message["numbers"]["round"]
            for spread in (message["bytes"], message["numbers"]):
                assert spread["min"] <= spread["mean"] <= spread["max"]
                assert spread["mean"] * message["clients"] == pytest.approx(spread["round"])
        assert [choice["key"] for choice in found["choices"]] == list(fields(METHODS[name]))
        for choice in found["choices"]:
            assert choice["about"]
            if choice["key"] not in ("steps", "head_epochs"):
                assert choice["value"] == choice[reading], "the preset is in force"


def parts(found: dict[str, Any], kind: str = "params") -> set[str]:
    return {part for entry in found["private"][kind] for part in entry["parts"]}


def test_what_stays_private() -> None:
    assert parts(told("fedproto")) == parts(told("local")) == {"body.*", "head.*"}
    assert parts(told("fedper", ONE)) == {"head.*"}
    assert parts(told("fedper", ONE, "method.preset=official")) == {"head.*"}
    assert parts(told("ditto", ONE)) == {"personal.*"}
    assert parts(told("fedrod", ONE)) == {"personal_head.*"}
    assert parts(told("fedavg", ONE)) == set()
    assert parts(told("fedrod", ONE), "memory") == {"share"}
    numbers = told("fedproto")["private"]["params"][0]["numbers"]
    assert set(numbers) == {"cnn_digits_8", "cnn_digits_16", "mlp_digits"}
    babu, nh = told("fedbabu", ONE)["private"]["params"], told("fednh", ONE)["private"]["params"]
    assert [(e["parts"], e["trained"], e["from_server"]) for e in babu] == [(["head.*"], "after the last round", True)]
    assert [(e["parts"], e["trained"], e["from_server"]) for e in nh] == [(["head.*"], "never", False)]


def test_what_the_server_learns() -> None:
    def learns(*words: str) -> str:
        return "\n".join(told(*words)["private"]["server_learns"])

    assert learns("local") == "nothing: clients send no message"
    assert "the sum over the 4 clients of a round: prototypes" in learns("fedproto")
    assert "how many hold each class" in learns("fedproto")
    assert "how many samples there are of each class" in learns("fedproto", "method.aggregation=weighted")
    assert "which classes it holds" not in learns("fedproto")
    assert "number of training samples" in learns("fedavg", ONE)
    assert "number of training samples" not in learns("fedavg", ONE, "method.weighting=uniform")
    assert "of each single client: model, weight" in learns("fesem", ONE)
    assert "about each single client: which classes it holds (rows of prototypes)" in learns("mpfedcl", ONE)
    assert "of the round's only client: prototypes" in learns("fedproto", "participation=0.3")


def test_the_docs_name_every_method_whose_uploads_are_used_one_by_one() -> None:
    """A reader chooses a method by what the server must not see."""
    single = {
        name
        for name in METHODS
        if any(group["seen"] == ALONE for group in told(name, ONE, "method.preset=paper")["up"]["groups"])
    }
    assert single >= {"fesem", "fedpcl", "mpfedcl"}
    named = {"spfedcl": "mpfedcl", "dpfedcl": "mpfedcl"}  # its variants
    for page, line in (
        ("concepts.md", "| `Each` |"),
        ("choose.md", "| the server must see"),
        ("private.md", "FeSEM, FedPAC"),
    ):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        said = (
            text[text.index(line) :].split("\n\n")[0]
            if page == "private.md"
            else text[text.index(line) :].split("\n")[0]
        )
        plain = re.sub(r"[^a-z0-9]", "", said.lower().replace("mp-, sp- and dp-fedcl", "mp-fedcl"))
        assert not [name for name in single if named.get(name, name) not in plain], page


def test_what_a_client_of_a_federation_tells_beside_its_uploads() -> None:
    def tells(*words: str) -> str:
        return str(told("fedproto", *words)["private"]["in_a_federation"])

    budget = ("data.normalize=half", "privacy.unit=client", "privacy.epsilon=8", "privacy.clip=2")
    assert "its mean training loss, how many training and test samples it has" in tells()
    assert "how many were right" in tells()
    masked = tells("privacy.secure_sum=true")
    assert "how many training and test samples it has" in masked
    assert "Its loss is in the sum, and its test results stay with it" in masked
    assert "no loss, no number of samples, no test result" in tells(*budget, "privacy.where=client")
    assert tells(*budget, "privacy.where=server") == "", "which a federation refuses"
    assert "In a federation\n  each client also tells" in shown("fedproto", *SMALL)


def test_a_method_that_names_no_loss_has_no_empty_title() -> None:
    Path("quiet.py").write_text("from protofed.methods.local import Local\n\nclass Quiet(Local):\n    losses = ()\n")
    assert "\nLosses" not in shown("quiet:Quiet", *SMALL)
    assert "\nLosses\n  CE" in shown("local", *SMALL)


def test_groups_name_parts_and_rows() -> None:
    up = told("fednh", ONE)["up"]["groups"]
    assert [(g["name"], g["parts"], g["tensors"]) for g in up[:2]] == [("body", ["body.*"], 6), ("body", ["scale"], 1)]
    assert up[2]["shape"] == [10, 32]
    assert up[2]["rows"]["of"] == 10
    assert up[2]["numbers"]["round"] == 32 * up[2]["rows"]["round"]
    assert {g["seen"] for g in up} == {"seen singly, then summed"}
    mp = told("mpfedcl", ONE)
    assert {g["name"]: g["seen"] for g in mp["up"]["groups"]}["prototypes"] == "seen singly, used singly"
    assert {g["seen"] for g in mp["down"]["groups"]} == {"the same for all clients"}
    assert {g["seen"] for g in told("fesem", ONE)["down"]["groups"]} == {"each client its own"}


def test_phases() -> None:
    head, body, last = told("fedrep", ONE)["phases"]
    assert (head["trains"], head["epochs"], head["when"]) == (["head.*"], 10, "every round")
    assert (body["trains"], body["epochs"], body["lr"]) == (["body.*"], 2, 0.05)
    assert (last["trains"], last["when"]) == (["head.*"], "after the last round")
    tuned = told("fedbabu", ONE, "method.preset=paper")["phases"][-1]
    assert (tuned["lr"], tuned["lr_from"]) == (0.001, "method")
    assert sum(head["numbers"].values()) + sum(body["numbers"].values()) == sum(tuned["numbers"].values())


def test_prefixes_cover_what_is_meant_and_no_more() -> None:
    assert cover(["body.a.w", "body.a.b", "scale"], []) == ["body.*", "scale"]
    assert cover(["body.a.w", "body.a.b"], ["body.fc.w"]) == ["body.a.*"]
    assert cover(["body.a.w"], ["body.a.b"]) == ["body.a.w"]


def test_the_text() -> None:
    text = shown("fedproto", *SMALL, "method.lam=0.5")
    headings = ["fedproto: ", "Tan et al.", "Losses", "What goes up", "What goes down", "What stays private", "Choices"]
    places = [text.index(words) for words in headings]
    assert places == sorted(places)
    for words in (
        "Eq. 1",
        "Eqs. 7, 8",
        "rows sent",
        "seen singly",
        "bytes as serialised",
        "all 4 clients of the round",
    ):
        assert words in text
    for key in fields(METHODS["fedproto"]):
        assert key in text
    assert "0.5 *" in text
    assert "per_client *" in text  # the demo's own choice
    assert "FedPCL's code base" in text
    assert "nothing" in shown("local", *SMALL)
    assert "after the last round" in shown("fedbabu", ONE, *SMALL)
    assert "personal.*" in shown("ditto", ONE, *SMALL)


def test_json() -> None:
    found = json.loads(shown("fedproto", *SMALL, "--json"))
    assert set(found) >= KEYS
    assert found == json.loads(json.dumps(told("fedproto")))


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["fedprot"], "Did you mean 'fedproto'?"),
        (["demo"], "Known: "),
        (["fedproto", "method=fedavg"], "'method=fedavg' cannot be changed"),
        (["fedproto", "method.name=fedavg"], "'method.name=fedavg' cannot be changed"),
        (["fedproto", "method.preset=papr"], "Did you mean 'paper'?"),
        (["fedproto", "--experiment", "dmo"], "Did you mean 'demo'?"),
    ],
)
def test_mistakes(words: list[str], part: str) -> None:
    done = CliRunner().invoke(app, ["explain", *words])
    assert isinstance(done.exception, UserError)
    assert part in str(done.exception)


def test_a_method_for_one_model_is_explained_with_one() -> None:
    told = explain(Experiment.load("demo", "method=fedavg", "clients=3"))
    assert "needs one architecture" in told["note"]
    assert told["up"]["groups"]
    assert explain(Experiment.load("demo", "clients=3"))["note"] == ""
