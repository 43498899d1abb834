"""A budget in whole runs: what it costs, that it is kept, and that a stopped run pays for everything once."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from federated import small as federated
from small_runs import StopAfter, Told, final_state, wait_for

from protofed import Experiment, UserError, run
from protofed.explain.explain import explain
from protofed.methods.fedproto import FedProto
from protofed.privacy.accounting import spent
from protofed.privacy.ledger import LEDGER, Released, SpendingLedger
from protofed.remote.settings import Rounds, Task
from protofed.runs import releases as noising
from protofed.runs.folder import RunFolder
from protofed.runs.loop import Interrupted
from protofed.runs.setup import prepare

pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install 'protofed[privacy]'")
SMALL = (
    "clients=6", "rounds=3", "model=mlp_digits", "local_epochs=1", "engine=reference", "record.enabled=false",
    "device=cpu", "evaluate.own=0", "evaluate.gm=0", "data.normalize=half", "engine.threads=1", "partition.shots=4",
)  # fmt: skip
BUDGET = ("privacy.unit=client", "privacy.epsilon=8", "privacy.where=server")


def small(*overrides: str) -> Experiment:
    return Experiment.load("demo", *SMALL, *overrides)


def ledger(folder: str | Path) -> list[Released]:
    return SpendingLedger(Path(folder) / LEDGER).lines


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody stopped."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run(small(*BUDGET), folder)
    return folder


def test_a_run_keeps_its_budget_and_says_so(whole: Path) -> None:
    summary = json.loads((whole / "summary.json").read_text())
    about = summary["privacy"]
    assert 7.5 < summary["epsilon_spent"] <= 8
    assert summary["epsilon_spent"] == spent(about["noise"], 3, 1e-5)
    assert summary["delta"] == 1e-5
    assert len(about["signal_to_noise"]) == about["releases"] == about["releases_of_one"] == 3
    assert "seeded" in about["noise_source"]
    lines = RunFolder(whole).rounds()
    assert [line["loss"] for line in lines] == [None] * 3  # clients' losses are withheld
    assert [line["epsilon_spent"] for line in lines] == [spent(about["noise"], n, 1e-5) for n in (1, 2, 3)]
    assert [line["signal_to_noise"] for line in lines] == about["signal_to_noise"]
    assert [(line.round, line.attempt, len(line.clients)) for line in ledger(str(whole))] == [
        (n, 0, 6) for n in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("method", "where"),
    [("fedproto", "client"), ("fednh", "server"), ("fedpr", "server"), ("fedavg", "client"), ("spfedcl", "client")],
)
def test_both_engines_release_the_same(method: str, where: str) -> None:
    plan = (f"method={method}", "rounds=2", *BUDGET, f"privacy.where={where}", "privacy.noise=3")
    states = {}
    for engine in ("reference", "stacked"):
        run(small(*plan, f"engine={engine}", "engine.compile=never"), engine)
        state, _ = RunFolder(Path(engine)).restore()
        assert state is not None
        states[engine] = torch.utils._pytree.tree_leaves(state.server)
    for left, right in zip(states["reference"], states["stacked"], strict=True):
        assert torch.allclose(left, right, atol=1e-3)
    noise = [line.signal_to_noise for line in ledger("reference")]
    assert noise == pytest.approx([line.signal_to_noise for line in ledger("stacked")], abs=1e-3)


def test_with_hardly_any_noise_a_run_is_as_good_as_without() -> None:
    """FedProto's clients count alike by default, so only noise and clip make a difference, and here they make none."""
    plan = (
        "privacy.unit=client",
        "privacy.epsilon=1e11",
        "privacy.where=server",
        "privacy.clip=100.0",
        "privacy.noise=1e-5",
    )
    plain, private = run(small(), "plain"), run(small(*plan), "private")
    assert private.summary["accuracy_mean"] == plain.summary["accuracy_mean"]
    before, after = (RunFolder(Path(name)).restore()[0] for name in ("plain", "private"))
    assert before is not None
    assert after is not None
    assert torch.allclose(after.server.value, before.server.value, atol=0.05)
    assert torch.equal(after.server.weight, before.server.weight)


def test_a_model_moves_by_no_more_than_the_clip_in_a_round() -> None:
    plan = ("method=fedavg", "rounds=1", *BUDGET, "privacy.epsilon=1e11", "privacy.noise=1e-5", "privacy.clip=0.01")
    run(small(*plan), "out")
    state, _ = RunFolder(Path("out")).restore()
    assert state is not None
    start = prepare(small(*plan)).engine.specs()[0].params
    moved = torch.cat([(state.server["params"][name] - value).flatten() for name, value in start.items()])
    assert 0.002 < float(torch.linalg.vector_norm(moved)) <= 0.01


def test_a_run_ends_before_a_round_that_its_budget_does_not_pay_for() -> None:
    watch = Told()
    result = run(small(*BUDGET, "rounds=9", "privacy.noise=1.2", "evaluate.own=1"), "out", watch=watch)
    done = result.summary["rounds"]
    assert 1 < done < 9
    assert len(result.rounds) == len(ledger("out")) == done
    assert result.summary["epsilon_spent"] == spent(1.2, done, 1e-5) <= 8 < spent(1.2, done + 1, 1e-5)
    assert any(
        f"stopped after round {done} of 9" in note and "over privacy.epsilon = 8" in note for note in watch.notes
    )
    RunFolder(Path("out")).check_rounds(9)  # a sweep takes it as finished
    state, _ = RunFolder(Path("out")).restore()
    assert state is not None
    assert state.round == done


def test_a_client_pays_for_the_rounds_that_it_takes_part_in() -> None:
    result = run(small(*BUDGET, "participation=0.5", "rounds=4"), "out")
    times = [sum(number in line.clients for line in ledger("out")) for number in range(6)]
    assert sum(times) == 12
    assert max(times) == result.summary["privacy"]["releases_of_one"] <= 4
    assert result.summary["epsilon_spent"] == spent(result.summary["privacy"]["noise"], max(times), 1e-5)
    assert 7.5 < result.summary["epsilon_spent"] <= 8


# stopped runs


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_run_that_is_killed_at_a_release_pays_once_and_ends_the_same(
    where: str, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed just before a release is written down, and just after, when nothing has been made of it."""
    real = SpendingLedger.add

    def add(self: SpendingLedger, line: Released) -> None:
        if line.round == 2 and where == "before":
            raise _Killed
        real(self, line)
        if line.round == 2:
            raise _Killed

    monkeypatch.setattr(SpendingLedger, "add", add)
    with pytest.raises(_Killed):
        run(small(*BUDGET), "out", checkpoint_seconds=0)
    monkeypatch.setattr(SpendingLedger, "add", real)
    run(small(*BUDGET), "out", resume=True)
    assert final_state(Path("out")) == final_state(whole)
    assert Path("out", LEDGER).read_bytes() == (whole / LEDGER).read_bytes()


def test_rounds_that_were_not_saved_are_released_again_for_nothing(whole: Path) -> None:
    with pytest.raises(RuntimeError):
        run(small(*BUDGET), "out", watch=StopAfter(2, RuntimeError))  # no checkpoint but the first
    assert len(ledger("out")) == 2
    run(small(*BUDGET), "out", resume=True)
    assert Path("out", LEDGER).read_bytes() == (whole / LEDGER).read_bytes()
    assert final_state(Path("out")) == final_state(whole)


def test_another_result_for_a_released_round_gets_new_noise_and_is_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same noise, the difference of both results would show what was hidden."""
    drawn: list[torch.Tensor] = []
    real, draw = FedProto.upload, noising.seeded

    def upload(self: FedProto, *words: Any) -> Any:
        up, client = real(self, *words)
        return {"prototypes": up["prototypes"]._replace(total=up["prototypes"].total * 1.01)}, client

    def seeded(key: torch.Tensor, many: int) -> torch.Tensor:
        drawn.append(draw(key, many))
        return drawn[-1]

    budget = (*BUDGET, "privacy.noise=1.21", "privacy.clip=100", "rounds=4")
    with pytest.raises(RuntimeError):
        run(small(*budget), "out", watch=StopAfter(2, RuntimeError))
    monkeypatch.setattr(FedProto, "upload", upload)
    monkeypatch.setattr(noising, "seeded", seeded)
    watch = Told()
    result = run(small(*budget), "out", resume=True, watch=watch)
    attempts = [(line.round, line.attempt) for line in ledger("out")]
    assert attempts == [(1, 0), (2, 0), (1, 1), (2, 1)]
    assert result.summary["epsilon_spent"] == spent(1.21, 4, 1e-5) <= 8 < spent(1.21, 5, 1e-5)
    assert result.summary["rounds"] == 2  # the budget does not pay for four rounds, two of them twice
    assert not torch.isclose(drawn[0], drawn[1]).any()
    assert len({line.digest for line in ledger("out")}) == 4


@pytest.mark.slow
def test_a_process_that_is_killed_spends_nothing_twice(whole: Path) -> None:
    code = (
        "import sys; from protofed import Experiment, run;"
        "run(Experiment.load('demo', *sys.argv[1:]), 'out', resume=True, checkpoint_seconds=0)"
    )
    for line in (1,):
        process = subprocess.Popen([sys.executable, "-c", code, *SMALL, *BUDGET], stderr=subprocess.PIPE)
        wait_for(lambda least=line: Path("out", LEDGER).is_file() and len(ledger("out")) >= least, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    run(small(*BUDGET), "out", resume=True)
    assert Path("out", LEDGER).read_bytes() == (whole / LEDGER).read_bytes()
    assert final_state(Path("out")) == final_state(whole)


def test_a_line_that_a_kill_cut_off_was_never_released(whole: Path) -> None:
    with pytest.raises(RuntimeError):
        run(small(*BUDGET), "out", watch=StopAfter(2, RuntimeError))
    path = Path("out", LEDGER)
    path.write_bytes(path.read_bytes()[:-20])
    run(small(*BUDGET), "out", resume=True)
    assert path.read_bytes() == (whole / LEDGER).read_bytes()


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "says nothing of round 1"), (b"{}\n", "is damaged"), (b"[1\n", "is damaged")]
)
def test_a_run_without_its_ledger_does_not_go_on(content: bytes, said: str) -> None:
    with pytest.raises(Interrupted):
        run(small(*BUDGET), "out", watch=StopAfter(2))
    Path("out", LEDGER).write_bytes(content)
    with pytest.raises(UserError, match=said):
        run(small(*BUDGET), "out", resume=True)


# what bad input gets


def test_bodies_that_are_trained_are_refused_for_single_samples() -> None:
    with pytest.raises(UserError, match=r"privacy.unit = 'sample' needs a frozen encoder.*unit = 'client'"):
        run(small("privacy.unit=sample", "privacy.epsilon=8"), "out")
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["privacy.unit=client"], "privacy.epsilon = 0 is not a budget"),
        (["privacy.unit=client", "privacy.epsilon=-1"], "privacy.epsilon = -1 is not a budget"),
        (["privacy.epsilon=1"], "privacy.epsilon = 1.0 has no effect without a unit"),
        (["privacy.clip=2"], "privacy.clip = 2.0 has no effect without a unit"),
        ([*BUDGET, "privacy.delta=0.2"], "privacy.delta = 0.2 is not below 1 / 6"),
        ([*BUDGET, "privacy.delta=0"], "privacy.delta = 0"),
        ([*BUDGET, "privacy.clip=0"], "privacy.clip = 0"),
        ([*BUDGET, "privacy.epsilon=0.5", "privacy.noise=0.7"], "privacy.epsilon = 0.5 is too small for one round"),
        ([*BUDGET, "privacy.epsilon=1e-9", "privacy.delta=1e-12"], "its noise would be over 1,000,000 times"),
        ([*BUDGET, "privacy.where=sum"], "privacy.where = 'sum' needs a secure sum"),
        ([*BUDGET, "method=spfedcl"], "sends values client by client"),
        ([*BUDGET, "privacy.where=client", "method=fesem"], "can only noise means"),
        ([*BUDGET, "data.normalize=auto"], "data.normalize = 'auto' scales every sample by all clients' samples"),
        ([*BUDGET, "robust.rule=median"], "robust.rule = 'median' changes single uploads"),
        ([*BUDGET, "attack.kind=scale"], "attack.kind = 'scale' changes single uploads"),
        ([*BUDGET, "method=local"], "send nothing that could be noised"),
    ],
)
def test_bad_input_is_one_line_and_spends_nothing(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as found:
        run(small(*words), "out")
    assert "\n" not in str(found.value)
    assert not Path("out").exists()


def test_a_clip_that_leaves_nothing_is_told_with_the_measured_lengths() -> None:
    watch = Told()
    run(small(*BUDGET, "rounds=2", "privacy.clip=1e-6"), "out", watch=watch)
    told = [note for note in watch.notes if "privacy.clip = 1e-06 leaves less than 1% of every client's values" in note]
    assert len(told) == 1
    assert re.search(r"which are \d+\.\d+ to \d+\.\d+ long \(median \d+\.\d+\)", told[0])


def test_other_experiments_keep_their_hashes() -> None:
    assert "privacy" not in small().to_dict()
    assert small(*BUDGET).to_dict()["privacy"] == {"unit": "client", "epsilon": 8.0, "where": "server"}


def test_what_is_noised_is_told_at_the_beginning() -> None:
    notes = prepare(small(*BUDGET)).notes
    assert any(note.startswith("privacy: 330 numbers a round get noise of") for note in notes)


@pytest.mark.parametrize(
    ("words", "seen", "said"),
    [
        (["privacy.where=client"], "singly, noised, epsilon 8 for the run (by each client)", "against the server too"),
        (["privacy.where=server"], "seen singly, then summed and noised, epsilon 8 for the run (by the server)", "not"),
        (["method=spfedcl", "privacy.where=client"], "singly, noised, epsilon 8 for the run (by each client)", "too"),
    ],
)  # fmt: skip
def test_explain_says_of_every_array_how_it_is_seen(words: list[str], seen: str, said: str) -> None:
    told = explain(small(*BUDGET, *words))
    assert {group["seen"] for group in told["up"]["groups"]} == {seen}
    lines = told["private"]["server_learns"]
    assert "hides any single client with all its samples: epsilon 8, delta 1e-05" in lines[0]
    assert said in lines[1]
    assert "accuracies without noise" in lines[3]


def test_without_noise_explain_says_that_the_server_can_read_single_uploads() -> None:
    lines = explain(small())["private"]["server_learns"]
    assert any(line.startswith("the same about each client: it receives every upload singly") for line in lines)


def test_a_federation_is_refused_noise_that_its_clients_do_not_add(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")
    from protofed.remote.flower.setup import init

    words = {"names": ["a", "b", "c"], "hosts": ["localhost"], "port": 1, "rounds": Rounds(), "task": Task()}
    with pytest.raises(UserError, match=r"privacy.where = 'server' works in simulations only, and this is a real fed"):
        init(tmp_path / "new", experiment=federated(*BUDGET, "data.normalize=half"), **words)
    assert not (tmp_path / "new").exists()
    init(tmp_path / "new", experiment=federated(*BUDGET, "privacy.where=client", "data.normalize=half"), **words)
    assert 'action = "none"' in (tmp_path / "new" / "server" / "federation.toml").read_text()
