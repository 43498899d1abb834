"""A federation in one folder and one process, for tests."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from protofed import Experiment
from protofed.data.sources import load
from protofed.remote.build import task_of
from protofed.remote.client.bundle import make_worker
from protofed.remote.client.worker import ClientWorker
from protofed.remote.settings import experiment_hash
from protofed.remote.shares import export_shares
from protofed.remote.transport import LocalTransport

SMALL = ("clients=3", "rounds=2", "partition.shots=4", "partition.spread=1", "local_epochs=1", "engine=reference")


def small(*overrides: str) -> Experiment:
    return replace(Experiment.load("demo", *SMALL, *overrides), device="cpu")


def set_up(home: Path, experiment: Experiment, bounds: dict[str, Any] | None = None, **rounds: Any) -> Path:
    """Bundles, data and the server's folder, as an operator has them."""
    task = task_of(experiment)
    about = {"shape": list(task.shape), "classes": list(task.classes)}
    export_shares(experiment, load(experiment.data, None), home / "data")
    server = home / "server"
    server.mkdir()
    (server / "test.npz").write_bytes((home / "data" / "test.npz").read_bytes())
    names = [f"site-{number}" for number in range(experiment.clients)]
    secure = experiment.privacy.secure_sum
    keys = keys_of(experiment.clients) if secure else []
    listed = [{"number": number, "public_key": public} for number, (_, public) in enumerate(keys)]
    settings = {
        "federation": {"name": "test", "experiment": experiment_hash(experiment)},
        "rounds": {"minimum": experiment.clients, "deadline_s": 60} | rounds,
        "bounds": bounds or ({"action": "none"} if secure else {}),
        "task": about,
        "clients": [{"number": number, "name": name} for number, name in enumerate(names)],
    }
    (server / "federation.toml").write_text(tomli_w.dumps(settings))
    (server / "experiment.toml").write_text(experiment.to_toml())
    for number, name in enumerate(names):
        bundle = home / "clients" / name
        bundle.mkdir(parents=True)
        client: dict[str, Any] = {"client": {"number": number, "name": name, "server": "localhost:8443"}, "task": about}
        if secure:
            client["members"] = listed
            (bundle / "key").write_bytes(keys[number][0])
        (bundle / "client.toml").write_text(tomli_w.dumps(client))
        (bundle / "experiment.toml").write_text(experiment.to_toml())
    return server


def keys_of(clients: int) -> list[tuple[bytes, str]]:
    """A private and a public key for each client, as `federation init` makes them."""
    from protofed.remote.flower.certificates import make_client_key

    made = [make_client_key() for _ in range(clients)]
    return [(pair.key, pair.certificate.decode().strip()) for pair in made]


def worker(home: Path, number: int, **options: Any) -> ClientWorker:
    """A client that is started, or started again."""
    given: dict[str, Any] = {
        "data": str(home / "data" / f"client-{number:03d}.npz"),
        "model": None,
        "state": home / "clients" / f"site-{number}" / "state",
        "min_count": 0,
        "tell": lambda text: None,
    }
    return make_worker(home / "clients" / f"site-{number}", **given | options)


def workers(home: Path, count: int = 3) -> LocalTransport:
    """All clients; node 100 is client 0."""
    return LocalTransport({100 + number: worker(home, number) for number in range(count)})
