"""What a client refuses, keeps, withholds and says of itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import protofed
from federated import set_up, small, worker

from protofed import UserError
from protofed.engines.wire import decode
from protofed.method import Each, Mean
from protofed.remote.client.leaving import withhold
from protofed.remote.client.worker import ClientWorker
from protofed.remote.protocol import Message, body_of, pack_message, unpack_message
from protofed.remote.settings import load_client, load_federation

RUN = "0123456789abcdef"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("federation")
    set_up(folder, small("model=mlp_digits", "rounds=9"))
    return folder


def ask(one: ClientWorker, round: int = 1, down: Any = None, **head: Any) -> Message:
    asked = {"kind": "train", "experiment": one.hash, "run": RUN, "client": one.number, "round": round} | head
    return unpack_message(one.answer(pack_message(asked, body_of(one.down if down is None else down))))


def test_a_client_keeps_its_state_and_goes_back_no_further_than_a_resume(home: Path, tmp_path: Path) -> None:
    heard: list[str] = []
    one = worker(home, 0, state=tmp_path / "state", tell=heard.append)
    first = [ask(one, round) for round in range(1, 6)]
    assert [answer.head["kind"] for answer in first] == ["answer"] * 5
    assert one.state.rounds(RUN) == [5, 4, 3]
    one.close()
    one = worker(home, 0, state=tmp_path / "state", tell=heard.append)
    assert ask(one, 5).body == first[4].body  # the same question
    assert ask(one, 4).body == first[3].body  # the server is back at its last but one checkpoint
    other = replace_total(one.down, 0.5)
    different = ask(one, 5, other)  # the others sent something else this time: it is trained anew, from round 4
    assert different.body != first[4].body
    assert ask(one, 5).body == first[4].body
    assert "done round 5" in ask(one, 3, other).head["reason"]
    assert "done round 5" in ask(one, 2).head["reason"]
    damaged = tmp_path / "state" / RUN / "round-000005" / "client.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    assert ask(one, 5).body == first[4].body
    assert any("after round 5 is damaged" in text for text in heard)
    assert ask(one, 1, run="f" * 16).body == first[0].body  # a new run begins anew, and the old one stays
    assert one.state.rounds(RUN) == [5, 4, 3]
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


def replace_total(mean: Mean, value: float) -> Mean:
    return Mean(torch.full_like(mean.total, value), torch.ones_like(mean.weight))


def test_a_client_refuses_what_it_did_not_agree_to(home: Path, tmp_path: Path) -> None:
    one = worker(home, 0, state=tmp_path / "state")
    down = one.down
    cases = {
        "is not the one in this bundle": ask(one, experiment="0" * 64),
        "Install the same version on both": ask(one, protocol=99),
        "this is client 0, not client 2": ask(one, client=2),
        "not a whole number from 1 to 9": ask(one, 10),
        "no proper name": ask(one, run="../../etc"),
        "nothing that a client does": ask(one, kind="shell"),
        "NaN or infinite": ask(one, down=replace_total(down, float("nan"))),
        "is float32 (10, 7), where": ask(one, down=Mean(torch.ones(10, 7), torch.ones(10))),
        "other parts than expected": unpack_message(
            one.answer(pack_message(evaluate(one), body_of({"down": down, "other": down})))
        ),
        "is tested on": ask(one, kind="evaluate", ask=["own/secret"]),
        "classes are": ask(one, kind="hello", task={"classes": ["a"]}),
    }
    for reason, answer in cases.items():
        assert answer.head["kind"] == "error", reason
        assert reason in answer.head["reason"]
    assert "not a message of protofed" in unpack_message(one.answer(b"\xff\xff\xff\xff{}")).head["reason"]
    assert one.state.rounds(RUN) == []


def evaluate(one: ClientWorker) -> dict[str, Any]:
    asked = {"kind": "evaluate", "round": 0, "ask": ["own/personal"]}
    return asked | {"experiment": one.hash, "run": RUN, "client": one.number}


def test_classes_with_few_samples_are_withheld(home: Path, tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).random((9, 1, 8, 8)).astype(np.float32), np.array([3] * 5 + [7] * 3 + [8])
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    one, least = worker(home, 1, data=str(tmp_path / "own.npz"), state=tmp_path / "state", min_count=3), 3
    counts = one.engine.federation.counts[1]
    assert counts.sum() == 9
    sent = decode(ask(one).body)["prototypes"]
    assert ((sent.weight > 0) == (counts >= least)).all()
    assert (sent.total[counts < least] == 0).all()
    said = one.describe()
    assert f"{int((counts >= least).sum())} of 10 rows" in said
    assert f"Withheld (--min-count {least}): the rows of {int(((counts > 0) & (counts < least)).sum())} classes" in said
    ten = torch.tensor([5.0, 1.0, 0.0])
    up = {
        "model": Mean({"w": torch.ones(3)}, torch.tensor(6.0)),
        "pool": Each(Mean(torch.ones(3, 2, 4), torch.ones(3, 2))),
    }
    hidden = withhold(up, ten, 2)
    assert (hidden["model"].total["w"] == 1).all()
    assert hidden["pool"].rows.weight.tolist() == [[1, 1], [0, 0], [0, 0]]
    assert hidden["pool"].rows.total.sum((1, 2)).tolist() == [8, 0, 0]


def test_a_client_says_exactly_what_it_sends(home: Path, tmp_path: Path) -> None:
    one = worker(home, 2, state=tmp_path / "state")
    said, sent = one.describe(), ask(one)
    assert f"in all {len(sent.body):,} bytes" in said
    up = decode(sent.body)["prototypes"]
    rows = int((up.weight > 0).sum())
    assert f"prototypes: float32 (10, 32), {rows} of 10 rows, {rows * 128} bytes; seen singly, then summed" in said
    assert "mean training loss, seen singly" in said
    assert "how many hold each class" in said
    assert "how many test samples it has" in said
    assert one.state.rounds(RUN) == [1]  # describing trains nothing that is kept


def test_own_files_are_read_by_the_federations_classes(home: Path, tmp_path: Path) -> None:
    """Labels count the classes from 0, and names say which is which, whatever subset a client has."""
    x = np.random.default_rng(0).random((8, 1, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "plain.npz", x=x, y=np.array([3, 7] * 4))
    one = worker(home, 0, data=str(tmp_path / "plain.npz"), state=tmp_path / "a")
    assert one.engine.federation.counts[0].nonzero().flatten().tolist() == [3, 7]
    np.savez(tmp_path / "named.npz", x=x, y=np.array([0, 1] * 4), class_names=np.array(["9", "2"]))
    one = worker(home, 0, data=str(tmp_path / "named.npz"), state=tmp_path / "b")
    assert one.engine.federation.counts[0].nonzero().flatten().tolist() == [2, 9]
    np.savez(tmp_path / "beyond.npz", x=x, y=np.array([3, 10] * 4))
    with pytest.raises(UserError, match="labels from 3 to 10, but there are 10 classes"):
        worker(home, 0, data=str(tmp_path / "beyond.npz"), state=tmp_path / "c")
    np.savez(tmp_path / "other.npz", x=x, y=np.array([0, 1] * 4), class_names=np.array(["cat", "dog"]))
    with pytest.raises(UserError, match="has the class 'cat', which is none of"):
        worker(home, 0, data=str(tmp_path / "other.npz"), state=tmp_path / "d")


def test_settings_are_checked(home: Path, tmp_path: Path) -> None:
    assert load_federation(home / "server").rounds.minimum == 3
    bad = {
        "minimum = 4": ("[rounds]\nminimum = 4\n[[clients]]\nnumber = 0\n", "but there are 1 clients"),
        "twice": ("[[clients]]\nnumber = 0\n[[clients]]\nnumber = 0\n", "given to two"),
        "section": ("[round]\n", "unknown section"),
        "key": ("[rounds]\nminimun = 2\n", "Did you mean 'minimum'"),
        "toml": ("[rounds\n", "not valid TOML"),
    }
    for text, reason in bad.values():
        (tmp_path / "federation.toml").write_text(text)
        with pytest.raises(UserError, match=reason):
            load_federation(tmp_path)
    with pytest.raises(UserError, match="federation init"):
        load_federation(tmp_path / "nowhere")


def test_partition_exports_each_clients_samples() -> None:
    done = protofed("partition", "demo", "clients=3", "--out", "who", "--export", "shares")
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in Path("shares").iterdir()) == [*(f"client-00{n}.npz" for n in range(3)), "test.npz"]
    with np.load("shares/client-001.npz") as share:
        assert set(share.files) == {"x_train", "y_train", "x_test", "y_test", "class_names", "mean", "std"}
    again = protofed("partition", "demo", "clients=3", "--out", "who", "--export", "shares")
    assert again.returncode == 2
    assert "is not empty" in again.stderr


def test_a_federations_folder_is_no_clients_and_the_client_is_told_which(tmp_path: Path) -> None:
    (tmp_path / "fed/clients/north").mkdir(parents=True)
    with pytest.raises(UserError, match=r"client\.toml cannot be read .*Run 'protofed federation init' first\."):
        load_client(tmp_path / "fed")
    (tmp_path / "fed/clients/north/client.toml").write_text("")
    with pytest.raises(UserError, match=r"Name the folder that has one, such as .*fed/clients/north\."):
        load_client(tmp_path / "fed")
