"""A federation gives the numbers of the simulation, to the bit, and a folder that every report can read."""

import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import protofed
from federated import set_up, small, worker, workers

from protofed import UserError, run
from protofed.engines.wire import decode, encode
from protofed.remote.protocol import unpack_message
from protofed.remote.server.serve import serve
from protofed.remote.settings import experiment_hash
from protofed.remote.shares import export_shares
from protofed.remote.transport import LocalTransport
from protofed.report.live import serving
from protofed.runs.folder import RunFolder

CLOCK = ("seconds", "seconds_train", "parts")  # all that may differ
UNKNOWN = ("partition", "pm_v", "pm_l", *CLOCK)  # what a server without data cannot know
METHODS = {
    "fedproto": (),  # the demo's three architectures
    "fednh": ("model=mlp_digits", "participation=0.7"),  # some are scored with prototypes of an earlier round
    "fedavg": ("model=mlp_digits", "evaluate.validation=0.2", "optimizer.schedule=cosine"),
    "mpfedcl": ("model=mlp_digits", "method.clusters=2", "participation=0.7"),
    "fpl": ("model=mlp_digits", "participation=0.7"),  # as many clusters of a class as its clients lead to
    "fedplvm": ("model=mlp_digits",),
    "fedrep": ("model=mlp_digits", "evaluate.own=0"),  # with last phases
    "fedbabu": (  # with last phases after an early end
        "model=mlp_digits",
        "rounds=9",
        "evaluate.validation=0.2",
        "stopping.patience=1",
        "stopping.min_gain=0.9",
    ),
}


def without(line: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in keys}


@pytest.mark.parametrize("method", METHODS)
def test_a_federation_equals_its_simulation(method: str, tmp_path: Path) -> None:
    experiment = small(f"method={method}", *METHODS[method])
    simulated = run(experiment, tmp_path / "sim")
    said: list[str] = []
    server = set_up(tmp_path, experiment)
    transport = workers(tmp_path)
    result = serve(server, transport, said.append, pause=0.01)

    alone, _ = RunFolder(tmp_path / "sim").restore()
    together, _ = RunFolder(result.folder).restore()
    assert alone is not None
    assert together is not None
    assert encode(alone.server, whole=True) == encode(together.server, whole=True)
    assert [without(line, CLOCK) for line in simulated.rounds] == [without(line, CLOCK) for line in result.rounds]
    assert without(simulated.summary, UNKNOWN) == without(result.summary, UNKNOWN)
    for mine, theirs in zip(result.clients, simulated.clients, strict=True):
        assert without(mine, ("domain", "classes", "pm_v", "pm_l")) == without(
            theirs, ("domain", "classes", "pm_v", "pm_l")
        )
    confused = [np.load(folder / "confusion.npz")["personal"] for folder in (tmp_path / "sim", result.folder)]
    assert (confused[0] == confused[1]).all()

    exchanged = [(unpack_message(request), unpack_message(answer)) for _, request, answer in transport.sent]
    trained = [(down, up) for down, up in exchanged if down.head["kind"] == "train"]
    assert sum(len(up.body) for _, up in trained) == result.summary["bytes_up"]
    last = sum(len(encode(decode(down.body)["down"])) for down, _ in exchanged if down.head["kind"] == "finish")
    assert sum(len(down.body) for down, _ in trained) + last == result.summary["bytes_down"]
    for number, client in alone.clients.items():  # personal models are where they belong
        state = transport.workers[100 + number].state  # type: ignore[attr-defined]
        (name,) = [p.name for p in state.path.iterdir() if p.is_dir()]
        kept = state.at(name, 10**6)
        assert encode(kept.client, whole=True) == encode(client, whole=True)
    assert not any("NaN" in text or "refuse" in text for text in said)

    if method == "fedproto":
        _reports_read(result.folder)


def _reports_read(folder: Path) -> None:
    """`report`, `table` and `watch` take the folder of a federation for a run."""
    made = protofed("report", str(folder), "--out", "page.html")
    assert made.returncode == 0, made.stderr
    listed = protofed("table", str(folder))
    assert listed.returncode == 0, listed.stderr
    assert "fedproto" in listed.stdout
    with serving([folder], 0) as page, urllib.request.urlopen(f"http://127.0.0.1:{page.server_port}/") as answer:
        assert b"fedproto" in answer.read()


def test_the_experiments_own_share_is_the_default_data(tmp_path: Path) -> None:
    """Without --data a client takes its part of the experiment's data: the same samples, normalised alike."""
    experiment = small("model=mlp_digits", "evaluate.own=0")
    server = set_up(tmp_path, experiment)
    named, own = (
        worker(tmp_path, 1, data=source, state=tmp_path / str(i))
        for i, source in ((0, None), (1, str(tmp_path / "data" / "client-001.npz")))
    )
    for part in ("train", "test"):
        left, right = (getattr(w.engine.federation, part)(1) for w in (named, own))
        assert (left.x == right.x).all()
        assert (left.y == right.y).all()
    assert server.is_dir()


def test_a_method_that_averages_refuses_another_model(tmp_path: Path) -> None:
    """FedAvg goes on with those whose models are equal; the other is told why it may not."""
    server = set_up(tmp_path, small("method=fedavg", "model=mlp_digits", "evaluate.own=0"), minimum=2)
    heard: list[str] = []
    members = {
        100 + n: worker(tmp_path, n, model="cnn_digits" if n == 2 else None, tell=heard.append) for n in range(3)
    }
    said: list[str] = []
    result = serve(server, LocalTransport(members), said.append, pause=0.01)
    assert [line["clients"] for line in result.rounds] == [2, 2]
    assert any("site-2" in text and "needs one architecture" in text for text in said)
    assert "needs one architecture" in (members[102].refusal or "")
    assert any("the server refuses this client" in text for text in heard)
    again = serve(server, LocalTransport({}), said.append)  # finished: nobody is needed
    assert again.summary == result.summary
    with pytest.raises(UserError, match="in use by another client"):
        worker(tmp_path, 0)


def test_a_choice_of_clients_is_refused_where_those_who_are_there_take_part(tmp_path: Path) -> None:
    server = set_up(tmp_path, small("selection.rule=size"))
    with pytest.raises(UserError, match=r"selection.rule = 'size' is for simulations.* Remove \[selection\] from the"):
        serve(server, LocalTransport({}), print)


def test_clients_that_are_slow_in_a_simulation_are_refused(tmp_path: Path) -> None:
    server = set_up(tmp_path, small("stragglers.share=0.5"))
    with pytest.raises(UserError, match=r"\[stragglers\] slows clients of simulations down.* rounds.deadline_s in fed"):
        serve(server, LocalTransport({}), print)


def test_classes_that_appear_over_time_in_a_simulation_are_refused(tmp_path: Path) -> None:
    server = set_up(tmp_path, small("incremental.tasks=2"))
    with pytest.raises(
        UserError, match=r"\[incremental\] gives clients their classes one after another in simulations"
    ):
        serve(server, LocalTransport({}), print)


def test_samples_that_a_simulation_would_change_are_refused(tmp_path: Path) -> None:
    plain = small()
    server = set_up(tmp_path, plain)
    noisy = small("skew.labels=[0.5]")
    (server / "experiment.toml").write_text(noisy.to_toml())
    about = (server / "federation.toml").read_text()
    (server / "federation.toml").write_text(about.replace(experiment_hash(plain), experiment_hash(noisy)))
    with pytest.raises(
        UserError, match=r"\[skew\] changes clients' samples in simulations, and this is a real federation"
    ):
        serve(server, LocalTransport({}), print)
    with pytest.raises(UserError, match=r"--export writes samples as they are, and \[skew\] would change them"):
        export_shares(noisy, [], tmp_path / "other")
