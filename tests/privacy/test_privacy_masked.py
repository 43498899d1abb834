"""A budget and secure sums in a federation: clients add their shares of the noise under the masks."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from federated import set_up, small, worker

from protofed import Experiment, run
from protofed.engines.wire import decode
from protofed.privacy.accounting import spent
from protofed.privacy.ledger import LEDGER, SpendingLedger
from protofed.privacy.release import Layout
from protofed.remote.protocol import SPENT, pack_message, unpack_message
from protofed.remote.server.serve import serve
from protofed.remote.transport import LocalTransport, Reply
from protofed.runs.folder import RunFolder

pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install 'protofed[privacy]'")
pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")

CLIENTS = 5
PLAN = ("clients=5", "model=mlp_digits", "record.enabled=false", "data.normalize=half", "evaluate.own=1")
SHARED = ("privacy.unit=client", "privacy.epsilon=8", "privacy.where=sum", "privacy.secure_sum=true")


def shared(*overrides: str) -> Experiment:
    return small(*PLAN, *SHARED, *overrides)


def state_of(folder: Path) -> Any:
    state, _ = RunFolder(folder).restore()
    assert state is not None
    return state


class Lossy(LocalTransport):
    """Node 104 is lost where `gone` says so of a request's head."""

    def __init__(self, workers: Mapping[int, Any], gone: Any) -> None:
        super().__init__(workers)
        self.gone = gone

    def exchange(self, requests: Mapping[int, bytes], deadline: float) -> Iterator[Reply]:
        for node, request in requests.items():
            if node == 104 and self.gone(unpack_message(request).head):
                yield Reply(node, None, "it is gone")
            else:
                yield from super().exchange({node: request}, deadline)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was lost is greeted again at once."""
    monkeypatch.setattr("protofed.remote.server.roster.AGAIN", 0.05)


def served(home: Path, plan: Experiment, gone: Any = lambda head: False) -> tuple[Any, Lossy, list[str]]:
    set_up(home, plan, minimum=2)
    transport, said = Lossy({100 + number: worker(home, number) for number in range(CLIENTS)}, gone), []
    try:
        return serve(home / "server", transport, said.append, pause=0.01), transport, said
    finally:
        for one in transport.workers.values():
            one.close()  # type: ignore[attr-defined]


def account(home: Path, number: int) -> list[tuple[int, int]]:
    """What a client has released, by its own account: rounds and attempts."""
    lines = SpendingLedger(home / "clients" / f"site-{number}" / "state" / LEDGER).lines
    return [(line.round, line.attempt) for line in lines]


def own_vector(home: Path, number: int, round: int) -> torch.Tensor:
    """What a client has put into a sum, as it keeps it on its own disk."""
    (kept,) = (home / "clients" / f"site-{number}" / "state").glob(f"*/round-{round:06d}/answer.bin")
    vector: torch.Tensor = decode(unpack_message(kept.read_bytes()).body).total
    return vector


def test_with_hardly_any_noise_the_sum_is_that_of_a_simulation(tmp_path: Path) -> None:
    plan = shared("privacy.epsilon=1e11", "privacy.clip=100.0", "privacy.noise=1e-5", "privacy.bits=48", "rounds=1")
    run(plan, tmp_path / "sim")
    result, transport, said = served(tmp_path, plan)
    assert not any("refused" in text or "no sum" in text for text in said)
    mine, theirs = state_of(tmp_path / "sim").server, state_of(result.folder).server
    held = mine.weight > 0.5  # the count of a class that nobody has is noise alone
    assert held.any()
    assert torch.equal(held, theirs.weight > 0.5)
    assert torch.allclose(mine.total[held], theirs.total[held], atol=0.05)
    for _, _, answer in transport.sent:
        assert "loss" not in unpack_message(answer).head


def test_the_sum_of_those_who_are_left_has_enough_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of five is lost after it has trained: the shares of three of the other four are noise enough."""
    heard: list[torch.Tensor] = []
    opened = Layout.opened
    monkeypatch.setattr(Layout, "opened", lambda self, *words: (heard.append(words[0]), opened(self, *words))[1])
    plan = shared("rounds=1", "privacy.noise=3")
    result, _, _ = served(tmp_path, plan, lambda head: head["kind"] in ("mask", "open"))
    assert [line["clients"] for line in result.rounds] == [4]
    (total,) = heard
    vectors = [own_vector(tmp_path, number, 1) for number in range(4)]
    assert torch.allclose(total, torch.stack(vectors).sum(0), atol=1e-4)
    share = 3 / math.sqrt(3)
    for vector in vectors:  # a clip of 1 leaves little beside the noise
        assert float(vector.std()) == pytest.approx(share, rel=0.15)
    assert float(total.std()) == pytest.approx(share * 2, rel=0.15)
    assert float((total - vectors[0]).std()) > 0.85 * 3  # without what one client knows
    summary = result.summary
    assert summary["epsilon_spent"] == spent(3.0, 1, 1e-5)
    assert (summary["privacy"]["honest_answers"], summary["privacy"]["share"]) == (3, pytest.approx(share))
    assert SpendingLedger(result.folder / LEDGER).lines[0].clients == (0, 1, 2, 3)
    assert account(tmp_path, 4) == [(1, 0)]  # what is lost on its way is paid for, too
    assert account(tmp_path, 0) == [(1, 0)]


def test_a_sum_that_is_tried_again_has_the_same_noise_and_is_paid_once(tmp_path: Path) -> None:
    tries: list[str] = []

    def gone(head: dict[str, Any]) -> bool:
        if head["kind"] == "share":
            tries.append(head["try"])
        return head["kind"] == "share" and len(tries) == 1

    plan = shared("rounds=1", "privacy.threshold=5", "privacy.noise=3")
    result, _, said = served(tmp_path, plan, gone)
    assert "round 1 is tried again" in said
    assert len(set(tries)) == 2
    assert [line["clients"] for line in result.rounds] == [5]
    assert [account(tmp_path, number) for number in range(CLIENTS)] == [[(1, 0)]] * CLIENTS
    assert len(SpendingLedger(result.folder / LEDGER).lines) == 1


def test_a_sum_that_is_left_out_is_noted_and_the_run_goes_on_and_ends(tmp_path: Path) -> None:
    plan = shared("rounds=2", "privacy.threshold=5", "privacy.noise=3")
    result, _, said = served(tmp_path, plan, lambda head: head["kind"] == "open" and head["round"] == 1)
    assert any("round 1 is left out" in text for text in said)
    assert [line["clients"] for line in result.rounds] == [0, 5]
    assert [(line.round, line.clients) for line in SpendingLedger(result.folder / LEDGER).lines] == [
        (1, ()),
        (2, (0, 1, 2, 3, 4)),
    ]
    assert result.summary["epsilon_spent"] == spent(3.0, 1, 1e-5)
    assert account(tmp_path, 0) == [(1, 0), (2, 0)]


def test_budgets_that_are_spent_end_the_run(tmp_path: Path) -> None:
    plan = shared("rounds=4", "privacy.noise=1.1")
    result, transport, said = served(tmp_path, plan)
    done = result.summary["rounds"]
    assert 0 < done < 4
    assert result.summary["epsilon_spent"] == spent(1.1, done, 1e-5) <= 8 < spent(1.1, done + 1, 1e-5)
    assert any(text.startswith(f"stopped after round {done} of 4") for text in said)
    asked = next(r for n, r, _ in transport.sent if n == 100 and unpack_message(r).head["kind"] == "train")
    told = unpack_message(asked)
    head = {key: value for key, value in told.head.items() if key not in ("protocol", "protofed")}
    one = worker(tmp_path, 0)  # whatever the server asks, a client that has spent its budget sends nothing
    try:
        answer = unpack_message(one.answer(pack_message(head | {"round": done + 1}, told.body)))
        assert SPENT in answer.head["reason"]
        assert answer.body == b""
        said_first = one.describe()
    finally:
        one.close()
    assert (
        "only in the sum over at least 4 clients, noised, epsilon 8 for the run (by shares of 3 of them)" in said_first
    )
    assert "all of it, cut to a length of 1 and noised, as 1,344 bytes of masked numbers (32 bits each, no loss)" in (
        said_first
    )
