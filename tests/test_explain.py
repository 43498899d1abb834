"""`protofed explain`: its numbers are those of a real run, and it says what is sent, kept and chosen."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from protofed import Experiment, run
from protofed.cli import app
from protofed.errors import UserError
from protofed.explain import explain
from protofed.messages import cover
from protofed.methods import METHODS
from protofed.schema import fields

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
        assert found["phases"]
        for way in ("up", "down"):
            message = found[way]
            groups, beside = message["groups"], message["bytes_beside"]["round"]
            assert sum(g["bytes"]["round"] for g in groups) + beside == message["bytes"]["round"], "it adds up"
            counted = sum(g["numbers"]["round"] for g in groups if g["kind"] != "buffers")
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

    assert learns("local") == "nothing: no message goes up"
    assert "only summed over the 4 clients of a round: prototypes" in learns("fedproto")
    assert "how many hold each class" in learns("fedproto")
    assert "how many samples there are of each class" in learns("fedproto", "method.aggregation=weighted")
    assert "which classes it holds" not in learns("fedproto")
    assert "number of training samples" in learns("fedavg", ONE)
    assert "number of training samples" not in learns("fedavg", ONE, "method.weighting=uniform")
    assert "of every single client: model, weight" in learns("fesem", ONE)
    assert "of every single client: which classes it holds (rows of prototypes)" in learns("mpfedcl", ONE)
    assert "of a round's one client: prototypes" in learns("fedproto", "participation=0.3")


def test_groups_name_parts_and_rows() -> None:
    up = told("fednh", ONE)["up"]["groups"]
    assert [(g["name"], g["parts"], g["tensors"]) for g in up[:2]] == [("body", ["body.*"], 6), ("body", ["scale"], 1)]
    assert up[2]["shape"] == [10, 32]
    assert up[2]["rows"]["of"] == 10
    assert up[2]["numbers"]["round"] == 32 * up[2]["rows"]["round"]
    assert {g["seen"] for g in up} == {"summed over clients"}
    mp = told("mpfedcl", ONE)
    assert {g["name"]: g["seen"] for g in mp["up"]["groups"]}["prototypes"] == "client by client"
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
    for words in ("Eq. 1", "Eqs. 7, 8", "rows sent", "summed over clients", "bytes as serialised", "the round of 4"):
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
    assert "averages one architecture" in told["note"]
    assert told["up"]["groups"]
    assert explain(Experiment.load("demo", "clients=3"))["note"] == ""
