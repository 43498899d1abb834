"""A budget for single samples in a federation: class sums behind a frozen encoder, noised by each client."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import small_encoder
import torch
from federated import set_up, small, worker
from torch.utils._pytree import tree_leaves

from protofed import Experiment, UserError, run
from protofed.engines.wire import decode
from protofed.explain.explain import explain
from protofed.method import Mean
from protofed.privacy.accounting import spent
from protofed.privacy.ledger import LEDGER, Released, SpendingLedger
from protofed.remote.client.worker import ClientWorker
from protofed.remote.protocol import SPENT, body_of, unpack_message
from protofed.remote.server.serve import serve
from protofed.remote.transport import LocalTransport
from protofed.runs import frozen
from protofed.runs.folder import RunFolder

pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install 'protofed[privacy]'")
pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")

PLAN = ("model=small_encoder", "record.enabled=false", "evaluate.own=1", "privacy.unit=sample")
CLIENT = ("privacy.where=client",)
SUM = ("clients=5", "privacy.where=sum", "privacy.secure_sum=true", "privacy.bits=48")
HARDLY = ("privacy.epsilon=1e11", "privacy.clip=20.0", "privacy.noise=1e-5", "privacy.range=1000")
HARDLY_LOCAL = HARDLY[:-1]
WIDTH, CLASSES = 12, 10
NUMBERS = CLASSES * WIDTH + CLASSES


@pytest.fixture(autouse=True)
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_encoder.known(monkeypatch)
    monkeypatch.setenv("PROTOFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(frozen, "WORTH", -1.0)


def sampled(*overrides: str) -> Experiment:
    return small(*PLAN, *overrides)


def served(home: Path, plan: Experiment, heard: list[str] | None = None) -> tuple[Any, LocalTransport, list[str]]:
    """A federation from its beginning to its end."""
    if not (home / "server").exists():
        set_up(home, plan, bounds={"action": "none"}, minimum=2)
    tell = (lambda text: None) if heard is None else heard.append
    transport = LocalTransport({100 + number: worker(home, number, tell=tell) for number in range(plan.clients)})
    said: list[str] = []
    try:
        return serve(home / "server", transport, said.append, pause=0.01), transport, said
    finally:
        for one in transport.workers.values():
            one.close()  # type: ignore[attr-defined]


def state_of(folder: Path) -> Any:
    state, _ = RunFolder(folder).restore()
    assert state is not None
    return state


def account(home: Path, number: int) -> list[Released]:
    return SpendingLedger(home / "clients" / f"site-{number}" / "state" / LEDGER).lines


def same(mine: Any, theirs: Any, near: float) -> bool:
    """Equal up to noise, but for what nobody has, a count and a value of noise alone, and for heads that are solved of
    sums: these make much of little noise."""
    if isinstance(mine, dict) and "sums" in mine:
        mine, theirs = mine["sums"], theirs["sums"]
    if isinstance(mine, Mean) and mine.weight.ndim:
        held = mine.weight > 0.5
        return torch.equal(held, theirs.weight > 0.5) and torch.allclose(
            mine.value[held], theirs.value[held], atol=near
        )
    pairs = zip(tree_leaves(mine), tree_leaves(theirs), strict=True)
    return all(torch.allclose(a, b, atol=near) for a, b in pairs)


@pytest.mark.parametrize("method", ["fedproto", "classmeans", "lda", "qda", "ridge"])
@pytest.mark.parametrize("where", ["client", "sum"])
def test_with_hardly_any_noise_a_federation_is_its_simulation(method: str, where: str, tmp_path: Path) -> None:
    more = (*CLIENT, *HARDLY_LOCAL) if where == "client" else (*SUM, *HARDLY)
    plan = sampled(f"method={method}", "rounds=1", *more)
    run(plan, tmp_path / "sim")
    result, transport, said = served(tmp_path, plan)
    assert not any("refused" in text or "no sum" in text for text in said)
    assert same(state_of(tmp_path / "sim").server, state_of(result.folder).server, 0.05)
    for _, _, answer in transport.sent:
        assert "loss" not in unpack_message(answer).head


def test_what_is_sent_is_the_sum_of_clipped_samples_with_all_of_the_noise(tmp_path: Path) -> None:
    """By hand: each embedding is cut to sqrt(0.8) of the clip, and marks its class with sqrt(0.2) of it."""
    plan = sampled("method=fedproto", "rounds=1", "privacy.clip=0.5", "privacy.epsilon=1e11", "privacy.noise=1e-5")
    _, transport, _ = served(tmp_path, plan)
    again = worker(tmp_path, 0)
    x, y = again.engine.federation.train(0)
    again.close()
    bound = math.sqrt(0.8) * 0.5
    length = torch.linalg.vector_norm(x.double(), dim=1)
    assert int((length > bound).sum()) > 0
    z = x.double() * (bound / length).clamp(max=1)[:, None]
    sums = torch.stack([z[y == label].sum(0) for label in range(CLASSES)])
    counts = torch.bincount(y, minlength=CLASSES) * math.sqrt(0.2) * 0.5
    (sent,) = [a for n, r, a in transport.sent if n == 100 and unpack_message(r).head["kind"] == "train"]
    up = decode(unpack_message(sent).body)
    assert float(up.weight) == 1
    assert torch.allclose(up.total.double(), torch.cat([sums.flatten(), counts]), atol=1e-3)


@pytest.mark.parametrize("where", ["client", "sum"])
def test_each_client_pays_for_its_samples_from_an_account_that_no_server_can_overdraw(
    where: str, tmp_path: Path
) -> None:
    more = CLIENT if where == "client" else SUM
    plan = sampled("method=fedproto", "rounds=9", "privacy.epsilon=8", "privacy.noise=1.2", *more)
    heard: list[str] = []
    result, transport, _ = served(tmp_path, plan, heard)
    done = result.summary["rounds"]
    assert 0 < done < 9
    assert result.summary["epsilon_spent"] == spent(1.2, done, 1e-5) <= 8 < spent(1.2, done + 1, 1e-5)
    assert (result.summary["privacy"]["unit"], result.summary["privacy"]["hides"]) == (
        "sample",
        "one sample is there, or not",
    )
    assert "cryptographic" in result.summary["privacy"]["noise_source"]
    for number in range(plan.clients):
        assert [(line.round, line.attempt, line.unit) for line in account(tmp_path, number)] == [
            (round + 1, 0, "sample") for round in range(done)
        ]
    status = json.loads((tmp_path / "server" / "status.json").read_text())
    assert "noised, epsilon 8 for the run" in status["uploads"]
    last = [r for n, r, _ in transport.sent if n == 100 and unpack_message(r).head["kind"] == "train"][-1]
    one = worker(tmp_path, 0)
    try:  # a server that asks for one round more than the budget pays for
        head = {k: v for k, v in unpack_message(last).head.items() if k not in ("protocol", "protofed")}
        from protofed.remote.protocol import pack_message

        more_asked = pack_message(head | {"round": done + 1}, unpack_message(last).body)
        answer = unpack_message(one.answer(more_asked))
        assert answer.head["kind"] == "error"
        assert answer.head["reason"].startswith(SPENT)
        assert len(account(tmp_path, 0)) == done
    finally:
        one.close()
    hellos = [unpack_message(a).head for _, r, a in transport.sent if unpack_message(r).head["kind"] == "hello"]
    assert {(head["samples"], head["tests"]) for head in hellos} == {(1, 0)}


def test_noise_is_as_long_as_promised_and_nobodys_is_anothers(tmp_path: Path) -> None:
    plan = sampled("method=fedproto", "privacy.epsilon=8", "privacy.noise=30", *CLIENT)
    _, transport, _ = served(tmp_path, plan)
    bodies = [unpack_message(a).body for _, r, a in transport.sent if unpack_message(r).head["kind"] == "train"]
    vectors = torch.stack([decode(body).total for body in bodies])
    assert vectors.shape == (6, NUMBERS)
    for vector in vectors:
        assert float(vector.std()) == pytest.approx(30, rel=0.25)
    assert float(torch.corrcoef(vectors).fill_diagonal_(0).abs().max()) < 0.45


def test_sums_beyond_the_range_are_cut_before_the_noise_and_the_client_alone_says_so(tmp_path: Path) -> None:
    plan = sampled("method=fedproto", "rounds=1", *SUM, "privacy.epsilon=1e11", "privacy.noise=1e-4", "privacy.range=2")
    heard: list[str] = []
    _, _, said = served(tmp_path, plan, heard)
    assert any("were beyond privacy.range = 2 and were cut" in text for text in heard)
    assert not any("beyond" in text for text in said)
    for number in range(5):
        (kept,) = (tmp_path / "clients" / f"site-{number}" / "state").glob("*/round-000001/answer.bin")
        assert float(decode(unpack_message(kept.read_bytes()).body).total.abs().max()) < 2.01


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("privacy.where=server",), "privacy.where = 'server' works in simulations only"),
        (("privacy.sgd_rate=0.2",), "privacy.sgd_rate works in simulations only, and this is a real"),
        (("model=mlp_digits", "data.normalize=half"), "privacy.unit = 'sample' needs a frozen encoder"),
        (("model=mlp_digits",), "data.normalize = 'auto' scales every sample by all of its client's samples"),
        (("method.source=inloop",), "privacy.unit = 'sample' needs uploads that are computed from one sample"),
        (("privacy.delta=0.4",), "privacy.delta = 0.4 is not below 1 / "),
    ],
)  # fmt: skip
def test_both_sides_refuse_in_a_line_what_cannot_be_kept(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    set_up(tmp_path, sampled("method=fedproto", "privacy.epsilon=8", *words), bounds={"action": "none"})
    for start in (
        lambda: serve(tmp_path / "server", LocalTransport({}), lambda text: None),
        lambda: worker(tmp_path, 0),
    ):
        with pytest.raises(UserError) as caught:
            start()
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_client_refuses_what_only_it_can_know(tmp_path: Path) -> None:
    """More samples than delta allows, a small class to leave out, an account of another unit, a model that trains."""
    plan = sampled("method=fedproto", "privacy.epsilon=8", "privacy.delta=0.06", "data.normalize=half")
    set_up(tmp_path, plan, bounds={"action": "none"})
    with pytest.raises(UserError, match=r"privacy.delta = 0.06 is not below 1 / \d\d, so it would allow one of the"):
        worker(tmp_path, 0)
    (tmp_path / "b").mkdir()
    plan = sampled("method=fedproto", "privacy.epsilon=8", "data.normalize=half")
    set_up(tmp_path / "b", plan, bounds={"action": "none"})
    with pytest.raises(UserError, match="--min-count 3 leaves out small classes"):
        worker(tmp_path / "b", 0, min_count=3)
    with pytest.raises(UserError, match="needs a frozen encoder, because mlp_digits"):
        worker(tmp_path / "b", 0, model="mlp_digits")
    state = tmp_path / "b" / "clients" / "site-0" / "state"
    SpendingLedger(state / LEDGER).add(Released(1, 0, (0,), "a", 1.0, 2.0))
    with pytest.raises(UserError, match=r"accounts for privacy.unit = 'client', .*'sample': the two cannot be added"):
        worker(tmp_path / "b", 0)


def test_all_words_follow(tmp_path: Path) -> None:
    """What a client, the plan and the status page say of an array."""
    plan = sampled("method=fedproto", "privacy.epsilon=8", *CLIENT)
    set_up(tmp_path, plan, bounds={"action": "none"})
    one = worker(tmp_path, 0)
    try:
        assert isinstance(one, ClientWorker)
        said = one.describe()
    finally:
        one.close()
    assert "sums over samples, each cut to a length of 1, and noised before they are sent" in said
    assert "hides any single sample: epsilon 8, delta 1e-05, each cut to a length of 1" in said
    assert "singly, noised, epsilon 8 for the run (by each client)" in said
    assert "not how many samples it has" in said
    found = explain(plan)
    assert {group["seen"] for group in found["up"]["groups"]} == {
        "singly, noised, epsilon 8 for the run (by each client)"
    }
    assert "It tells no loss, no number of samples" in found["private"]["in_a_federation"]
    summed = explain(sampled("method=fedproto", "privacy.epsilon=8", *SUM))
    (seen,) = {group["seen"] for group in summed["up"]["groups"]}
    assert seen.startswith("only in the sum over at least 4 clients, noised, epsilon 8 for the run (by shares of 3")


def test_a_number_that_no_samples_have_is_refused(tmp_path: Path) -> None:
    """One such client would be the whole sum; how many samples it may have is in federation.toml."""
    plan = sampled("method=fedproto", "rounds=1", "privacy.epsilon=8", "privacy.noise=3", *CLIENT)
    set_up(tmp_path, plan, bounds={"action": "none", "samples": 100}, minimum=2)

    class Far(LocalTransport):
        def exchange(self, requests: Any, deadline: float) -> Any:
            for node, request in requests.items():
                for reply in super().exchange({node: request}, deadline):
                    message = unpack_message(reply.content or b"")
                    if node == 101 and unpack_message(request).head["kind"] == "train":
                        from protofed.remote.protocol import pack_message

                        head = {k: v for k, v in message.head.items() if k not in ("protocol", "protofed")}
                        far = decode(message.body)
                        body = body_of(Mean(far.total.index_fill(0, torch.tensor([5]), 200.0), far.weight))
                        reply = reply._replace(content=pack_message(head, body))
                    yield reply

    transport, said = Far({100 + number: worker(tmp_path, number) for number in range(3)}), []
    try:
        result = serve(tmp_path / "server", transport, said.append, pause=0.01)
    finally:
        for one in transport.workers.values():
            one.close()  # type: ignore[attr-defined]
    assert any("site-1: its upload has a number 200 from 0" in text for text in said)
    assert [line["clients"] for line in result.rounds] == [2]
