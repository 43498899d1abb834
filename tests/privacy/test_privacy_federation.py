"""A budget in a federation: clients clip and noise what they send, and each keeps an account of its own."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from federated import set_up, small, worker
from torch.utils._pytree import tree_leaves

from protofed import Experiment, UserError, run
from protofed.engines.wire import decode, encode
from protofed.explain.explain import explain
from protofed.method import Mean
from protofed.privacy.accounting import spent
from protofed.privacy.ledger import LEDGER, Released, SpendingLedger
from protofed.remote.client.worker import ClientWorker
from protofed.remote.protocol import SPENT, Refused, body_of, pack_message, unpack_message
from protofed.remote.server.noised import NoisedEngine
from protofed.remote.server.serve import serve
from protofed.remote.transport import LocalTransport
from protofed.runs.folder import RunFolder

pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install 'protofed[privacy]'")
PLAN = ("model=mlp_digits", "record.enabled=false", "data.normalize=half", "evaluate.own=1")
LOCAL = ("privacy.unit=client", "privacy.epsilon=8", "privacy.where=client")
HARDLY = ("privacy.epsilon=1e11", "privacy.clip=100.0")
NUMBERS = 10 * 32 + 10  # a prototype for each class, and whether it is there


def local(*overrides: str) -> Experiment:
    return small(*PLAN, *LOCAL, *overrides)


def crew(home: Path, clients: int = 3, said: list[str] | None = None) -> dict[int, ClientWorker]:
    tell = (lambda text: None) if said is None else said.append
    return {100 + number: worker(home, number, tell=tell) for number in range(clients)}


def served(home: Path, plan: Experiment, heard: list[str] | None = None) -> tuple[Any, LocalTransport, list[str]]:
    """A federation from its beginning to its end."""
    if not (home / "server").exists():
        set_up(home, plan, bounds={"action": "none"}, minimum=2)
    transport, said = LocalTransport(crew(home, plan.clients, heard)), []
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
    """What a client of its own account has released."""
    return SpendingLedger(home / "clients" / f"site-{number}" / "state" / LEDGER).lines


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, LocalTransport, list[str]]:
    """A federation with much noise, and all that was sent in it."""
    home = tmp_path_factory.mktemp("federation")
    return home, *served(home, local("privacy.noise=3"))


def test_clients_send_vectors_with_all_of_the_noise_and_nothing_else(noisy: Any) -> None:
    _, _, transport, _ = noisy
    vectors = []
    for _, request, answer in transport.sent:
        asked, head = unpack_message(request).head["kind"], unpack_message(answer).head
        assert asked in ("hello", "train")  # nobody is asked for its tests
        assert "loss" not in head
        if asked == "hello":
            assert (head["samples"], head["tests"]) == (1, 0)
        else:
            up = decode(unpack_message(answer).body)
            assert float(up.weight) == 1
            vectors.append(up.total)
    assert len(vectors) == 6
    assert all(len(vector) == NUMBERS for vector in vectors)
    for vector in vectors:  # a clip of 1 and noise of 3: the noise is nearly all of it
        assert float(vector.std()) == pytest.approx(3, rel=0.15)
    together = torch.stack(vectors)
    assert float(torch.corrcoef(together).fill_diagonal_(0).abs().max()) < 0.3  # nobody's noise is another's


def test_the_server_and_each_client_keep_an_account(noisy: Any) -> None:
    home, result, _, _ = noisy
    summary = result.summary
    assert summary["epsilon_spent"] == spent(3.0, 2, 1e-5) < 8
    assert summary["privacy"]["releases"] == 2
    assert len(summary["privacy"]["signal_to_noise"]) == 2
    assert "cryptographic" in summary["privacy"]["noise_source"]
    assert summary["accuracy_mean"] is None
    assert [line["loss"] for line in result.rounds] == [None, None]
    lines = SpendingLedger(result.folder / LEDGER).lines
    assert [(line.round, line.attempt, line.clients) for line in lines] == [(1, 0, (0, 1, 2)), (2, 0, (0, 1, 2))]
    for number in range(3):
        assert [(line.round, line.attempt, line.clients) for line in account(home, number)] == [
            (1, 0, (number,)),
            (2, 0, (number,)),
        ]
    status = json.loads((home / "server" / "status.json").read_text())
    assert status["uploads"] == "seen singly, noised, epsilon 8 for the run"


@pytest.mark.parametrize("method", ["fedproto", "fedavg", "spfedcl"])
def test_with_hardly_any_noise_a_federation_is_its_simulation(method: str, tmp_path: Path) -> None:
    plan = local(f"method={method}", *HARDLY, "privacy.noise=1e-5", "rounds=1")
    run(plan, tmp_path / "sim")
    result, _, said = served(tmp_path, plan)
    assert not any("refused" in text for text in said)
    pairs = zip(
        tree_leaves(state_of(tmp_path / "sim").server), tree_leaves(state_of(result.folder).server), strict=True
    )
    assert all(torch.allclose(mine, theirs, atol=0.05) for mine, theirs in pairs)


def asked_to_train(transport: LocalTransport, node: int, round: int) -> bytes:
    found = [request for one, request, _ in transport.sent if one == node]
    heads = [unpack_message(request).head for request in found]
    return next(r for r, h in zip(found, heads, strict=True) if (h["kind"], h.get("round")) == ("train", round))


def with_head(message: bytes, body: bytes | None = None, **more: Any) -> bytes:
    told = unpack_message(message)
    head = {key: value for key, value in told.head.items() if key not in ("protocol", "protofed")}
    return pack_message(head | more, told.body if body is None else body)


def test_a_request_that_comes_again_gets_the_same_noise_for_nothing_and_another_one_pays(tmp_path: Path) -> None:
    plan = local("privacy.noise=3")
    _, transport, _ = served(tmp_path, plan)
    first = asked_to_train(transport, 100, 2)
    (answer,) = [answer for node, request, answer in transport.sent if (node, request) == (100, first)]
    again = worker(tmp_path, 0)  # started again
    try:
        assert unpack_message(again.answer(first)).body == unpack_message(answer).body
        assert len(account(tmp_path, 0)) == 2
        down = decode(unpack_message(first).body)  # with other prototypes, whatever the noise made of the first round's
        other = with_head(first, encode(Mean(torch.ones_like(down.total), torch.ones_like(down.weight))))
        sent = unpack_message(again.answer(other))
        assert sent.head["kind"] == "answer"
        lines = account(tmp_path, 0)
        assert [(line.round, line.attempt) for line in lines] == [(1, 0), (2, 0), (2, 1)]
        apart = decode(sent.body).total - decode(unpack_message(answer).body).total
        assert float(apart.std()) == pytest.approx(3 * 2**0.5, rel=0.15)  # two noises, not one
        tests = with_head(first, kind="evaluate", ask=["own/personal"], confusion="")
        assert "it tells no test results" in unpack_message(again.answer(tests)).head["reason"]
    finally:
        again.close()


def test_a_broadcast_that_spoils_a_clients_loss_gets_noise_for_an_answer_and_is_paid_for(tmp_path: Path) -> None:
    """A refusal would say, without noise and for nothing, that the client has samples of these classes."""
    plan = local("privacy.noise=3")
    _, transport, _ = served(tmp_path, plan)
    request = asked_to_train(transport, 100, 2)
    down = decode(unpack_message(request).body)
    hostile = with_head(request, encode(Mean(torch.full_like(down.total, 1e30), torch.ones_like(down.weight))))
    said: list[str] = []
    again = worker(tmp_path, 0, tell=said.append)
    try:
        answer = unpack_message(again.answer(hostile))
        assert any("in round 2 its loss is no longer a number. The server is not told" in text for text in said)
        assert (answer.head["kind"], len(account(tmp_path, 0))) == ("answer", 3)
        assert set(answer.head) == {"protocol", "protofed", "kind", "experiment", "run", "client", "session", "round"}
        sent = decode(answer.body).total
        assert float(sent.std()) == pytest.approx(3, rel=0.15)
        said.clear()
        assert unpack_message(again.answer(request)).head["kind"] == "answer"  # it trains as before
        assert not any("no longer a number" in text for text in said)
    finally:
        again.close()


def test_an_error_that_quotes_samples_stays_in_the_clients_own_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, transport, _ = served(tmp_path, local("privacy.noise=3"))
    said: list[str] = []
    again = worker(tmp_path, 0, tell=said.append)

    def fail(*_: Any) -> Any:
        raise RuntimeError("sample 7 of class 3")

    monkeypatch.setattr(again.engine, "update", fail)
    try:
        request = asked_to_train(transport, 100, 2)
        down = decode(unpack_message(request).body)
        other = with_head(request, encode(Mean(torch.ones_like(down.total), torch.ones_like(down.weight))))
        head = unpack_message(again.answer(other)).head
        assert head["kind"] == "error"
        assert head["reason"].startswith("it failed, and only its own log says why")
        assert "failed: RuntimeError: sample 7 of class 3" in said
        assert len(account(tmp_path, 0)) == 2
    finally:
        again.close()


def test_a_client_that_has_spent_its_budget_sends_nothing_and_the_run_ends(tmp_path: Path) -> None:
    """Whatever the server says: two clients have paid for another run before, and two are needed for a round."""
    plan = local("privacy.noise=1.1", "rounds=3")
    set_up(tmp_path, plan, bounds={"action": "none"}, minimum=2)
    for number in (0, 1):
        state = tmp_path / "clients" / f"site-{number}" / "state"
        state.mkdir()
        ledger = SpendingLedger(state / LEDGER)
        for round in (1, 2):
            ledger.add(Released(round, 0, (number,), "before", 0.5, 1.1))
    heard: list[str] = []
    assert spent(1.1, 3, 1e-5) <= 8 < spent(1.1, 4, 1e-5)
    result, transport, said = served(tmp_path, plan, heard)
    assert [line["clients"] for line in result.rounds] == [3]
    assert [len(account(tmp_path, number)) for number in range(3)] == [3, 3, 2]
    assert any(text.startswith("stopped after round 1 of 3: epsilon") for text in said)
    assert any(f"refused what the server asked: {SPENT}: epsilon" in text for text in heard)
    refused = [unpack_message(answer) for _, _, answer in transport.sent if b'"error"' in answer]
    assert all(SPENT in message.head["reason"] and message.body == b"" for message in refused)
    assert result.summary["rounds"] == 1


def test_the_server_ends_the_run_before_its_account_is_over_the_budget(tmp_path: Path) -> None:
    plan = local("privacy.noise=1.2", "rounds=9")
    result, _, _ = served(tmp_path, plan)
    done = result.summary["rounds"]
    assert 0 < done < 9
    assert result.summary["epsilon_spent"] == spent(1.2, done, 1e-5) <= 8 < spent(1.2, done + 1, 1e-5)
    assert all(len(account(tmp_path, number)) == done for number in range(3))


def test_a_clip_that_leaves_nothing_is_told_by_the_client_alone(tmp_path: Path) -> None:
    heard: list[str] = []
    _, transport, said = served(tmp_path, local("rounds=1", "privacy.clip=1e-6"), heard)
    assert sum("privacy.clip = 1e-06 leaves less than 1% of this upload's values, which are" in t for t in heard) == 3
    assert not any("long" in text for text in said)
    assert not any(b" long" in answer for _, _, answer in transport.sent)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("privacy.where=server",), "privacy.where = 'server' works in simulations only, and this is a real"),
        (("privacy.unit=sample",), "privacy.unit = 'sample' needs a frozen encoder, because mlp_digits"),
        (("privacy.delta=0.4",), "privacy.delta = 0.4 is not below 1 / 3"),
        (("privacy.epsilon=0.5", "privacy.noise=0.7"), "privacy.epsilon = 0.5 is too small for one round"),
        (("method=fesem",), "can only noise means"),
        (("robust.rule=median",), "robust.rule = 'median' changes single uploads"),
    ],
)  # fmt: skip
def test_both_sides_refuse_in_a_line_what_cannot_be_kept(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    set_up(tmp_path, local(*words), bounds={"action": "none"})
    with pytest.raises(UserError) as caught:
        serve(tmp_path / "server", LocalTransport({}), lambda text: None)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError) as caught:
        worker(tmp_path, 0)
    assert said in str(caught.value)


def test_bounds_that_need_single_uploads_are_refused_with_noise(tmp_path: Path) -> None:
    set_up(tmp_path, local(), bounds={"action": "clip"})
    with pytest.raises(
        UserError, match=r"bounds.action = 'clip' judges .* and \[privacy\] noises them. Write action = "
    ):
        serve(tmp_path / "server", LocalTransport({}), lambda text: None)


def test_the_account_before_it_joins_says_what_the_noise_is_worth(tmp_path: Path) -> None:
    plan = local()
    set_up(tmp_path, plan, bounds={"action": "none"})
    one = worker(tmp_path, 0)
    try:
        said = one.describe()
    finally:
        one.close()
    assert "singly, noised, epsilon 8 for the run (by each client)" in said
    assert "cut to a length of 1 and noised before they are sent. No loss is sent" in said
    assert "10 of 10 rows" in said
    assert "hides any single client with all its samples: epsilon 8, delta 1e-05, each cut to a length of 1" in said
    assert "how many it has (" not in said
    assert "It tells no results of its tests, and not how many samples it has" in said
    seen = {group["seen"] for group in explain(plan)["up"]["groups"]}
    assert seen == {"singly, noised, epsilon 8 for the run (by each client)"}


def test_a_client_that_would_add_other_noise_does_not_take_part(tmp_path: Path) -> None:
    """Of another dp-accounting, say: both sides compute the noise from the budget."""
    plan = local("rounds=1")
    set_up(tmp_path, plan, bounds={"action": "none"}, minimum=2)
    transport, said = LocalTransport(crew(tmp_path)), []
    other = transport.workers[101]
    assert isinstance(other, ClientWorker)
    assert other.noise is not None
    other.noise.noise *= 1.01
    try:
        result = serve(tmp_path / "server", transport, said.append, pause=0.01)
    finally:
        for one in transport.workers.values():
            one.close()  # type: ignore[attr-defined]
    assert [line["clients"] for line in result.rounds] == [2]
    assert any("site-1: it adds noise of" in text and "Install the same dp-accounting" in text for text in said)


def test_an_account_survives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a line is taken off again, so that the next one is whole."""
    path = tmp_path / LEDGER
    ledger = SpendingLedger(path)
    ledger.add(Released(1, 0, (0,), "a", 1.0, 2.0))

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            ledger.add(Released(2, 0, (0,), "b", 1.0, 2.0))
    assert len(ledger.lines) == 1
    ledger.add(Released(2, 0, (0,), "c", 1.0, 2.0))
    assert [line.digest for line in SpendingLedger(path).lines] == ["a", "c"]


@pytest.mark.parametrize("noise", ["NaN", "0", "-1.0", "Infinity"])
def test_an_account_whose_noise_is_no_number_pays_for_nothing(tmp_path: Path, noise: str) -> None:
    line = f'{{"round": 1, "attempt": 0, "clients": [0], "digest": "a", "signal_to_noise": 1.0, "noise": {noise}}}'
    (tmp_path / LEDGER).write_text(line + "\n")
    with pytest.raises(UserError, match="its noise is not a positive number"):
        SpendingLedger(tmp_path / LEDGER)


def test_an_upload_farther_than_any_noise_is_refused() -> None:
    """One such client would be the whole sum."""
    plan = local("privacy.noise=3")
    engine = object.__new__(NoisedEngine)
    engine.experiment = plan
    form = Mean(torch.zeros(NUMBERS), torch.ones(()))
    member: Any = SimpleNamespace(form=form, number=0)
    far = Mean(torch.zeros(NUMBERS).index_fill_(0, torch.tensor([5]), 1e30), torch.ones(()))
    with pytest.raises(Refused, match=r"a number 1e\+30 from 0"):
        engine._upload(member, unpack_message(pack_message({"kind": "answer"}, body_of(far))))
