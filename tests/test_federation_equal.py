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
from protofed.federation.protocol import unpack
from protofed.federation.serve import serve
from protofed.federation.transport import LocalTransport
from protofed.folder import RunFolder
from protofed.watch import serving

CLOCK = ("seconds", "seconds_train", "parts")  # all that may differ
UNKNOWN = ("partition", "pm_v", "pm_l", *CLOCK)  # what a server without data cannot know
METHODS = {
    "fedproto": (),  # the demo's three architectures
    "fednh": ("model=mlp_digits",),
    "fedavg": ("model=mlp_digits", "evaluate.validation=0.2"),
    "mpfedcl": ("model=mlp_digits", "method.clusters=2", "participation=0.7"),
    "fedrep": ("model=mlp_digits", "evaluate.own=0"),  # with last phases
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

    exchanged = [(unpack(request), unpack(answer)) for _, request, answer in transport.sent]
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
    assert any("site-2" in text and "averages one architecture" in text for text in said)
    assert "averages one architecture" in (members[102].refusal or "")
    assert any("the server refuses this client" in text for text in heard)
    again = serve(server, LocalTransport({}), said.append)  # finished: nobody is needed
    assert again.summary == result.summary
    with pytest.raises(UserError, match="in use by another client"):
        worker(tmp_path, 0)
