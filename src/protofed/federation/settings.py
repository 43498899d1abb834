"""What an operator sets: federation.toml for the server, client.toml in a client's bundle, one experiment in both."""

import hashlib
import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le

from protofed import schema
from protofed.data.sources import load
from protofed.errors import UserError
from protofed.experiment import Experiment

ELSEWHERE = ("device", "engine")  # how and where it is computed: each side has its own


@dataclass(frozen=True)
class Rounds:
    """When a round begins and ends (the [rounds] section)."""

    minimum: Annotated[int, Ge(1)] = 1
    """Clients that must be there to begin a round, and must have answered when it closes."""
    deadline_s: Annotated[float, Gt(0), Le(10_000_000)] = 600.0
    """Seconds that a client has to answer; later answers are refused."""
    wait_s: Annotated[float, Ge(0), Le(10_000_000)] = 0.0
    """Seconds to wait at the beginning for all clients, before going on with the minimum; 0: only for the minimum."""
    max_bytes: Annotated[int, Ge(1024)] = 268_435_456
    """Bytes of an answer at most; larger ones are refused unread."""


@dataclass(frozen=True)
class Task:
    """What all clients must agree on about the data (the [task] section), since the server has none."""

    shape: tuple[int, ...] = ()
    """Of one sample as a model gets it: (channels, height, width), or (features,)."""
    classes: tuple[str, ...] = ()
    """Their names, in the order of the labels."""


@dataclass(frozen=True)
class Member:
    """One client that may take part (a [[clients]] entry of federation.toml)."""

    number: Annotated[int, Ge(0)] = 0
    name: str = ""
    public_key: str = ""


@dataclass(frozen=True)
class Address:
    """The [federation] section."""

    name: str = "federation"
    host: str = "localhost"
    port: Annotated[int, Ge(1), Le(65535)] = 8443
    experiment: str = ""
    """The hash of experiment.toml, which every bundle repeats."""


@dataclass(frozen=True)
class FederationSettings:
    """All of federation.toml."""

    federation: Address = field(default_factory=Address)
    rounds: Rounds = field(default_factory=Rounds)
    task: Task = field(default_factory=Task)
    clients: tuple[Member, ...] = ()

    def name_of(self, number: int) -> str:
        return next((m.name for m in self.clients if m.number == number and m.name), f"client-{number:03d}")


@dataclass(frozen=True)
class ClientSettings:
    """The [client] section of client.toml."""

    number: Annotated[int, Ge(0)] = 0
    name: str = ""
    server: str = ""
    """Where the server is: host:port."""


def experiment_hash(experiment: Experiment) -> str:
    """The same on both sides, whatever device and engine each of them has."""
    agreed = {key: value for key, value in experiment.to_dict().items() if key not in ELSEWHERE}
    return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()


def load_federation(folder: Path) -> FederationSettings:
    """federation.toml in the server's folder, checked."""
    raw = _read(folder / "federation.toml", ("federation", "rounds", "task", "clients"))
    members = tuple(Member(**schema.check("clients", Member, entry)) for entry in raw.get("clients", []))
    numbers = [member.number for member in members]
    if len(set(numbers)) < len(numbers):
        raise UserError(f"{folder / 'federation.toml'}: a number is given to two [[clients]]. Give each its own.")
    settings = FederationSettings(
        Address(**schema.check("federation", Address, raw.get("federation", {}))),
        Rounds(**schema.check("rounds", Rounds, raw.get("rounds", {}))),
        _task(raw),
        members,
    )
    if members and settings.rounds.minimum > len(members):
        raise UserError(
            f"rounds.minimum = {settings.rounds.minimum}, but there are {len(members)} clients. Use at most that many."
        )
    return settings


def load_client(bundle: Path) -> tuple[ClientSettings, Task]:
    """client.toml of a bundle, and the task where it says one."""
    raw = _read(bundle / "client.toml", ("client", "task"))
    return ClientSettings(**schema.check("client", ClientSettings, raw.get("client", {}))), _task(raw)


def load_experiment(folder: Path, agreed: str = "") -> Experiment:
    """experiment.toml of a server's folder or a bundle; `agreed` is the hash it must have."""
    experiment = Experiment.load(folder / "experiment.toml")
    if agreed and experiment_hash(experiment) != agreed:
        raise UserError(
            f"{folder / 'experiment.toml'} was changed after the federation was set up: its hash is "
            f"{experiment_hash(experiment)[:12]}, federation.toml says {agreed[:12]}. Restore it, or set up a new one."
        )
    return experiment


def task_of(experiment: Experiment, data_dir: Path | None = None) -> Task:
    """The task of an experiment whose data is here: its first domain's shape, and the classes."""
    domain = load(experiment.data, data_dir)[0]
    return Task(domain.shape, domain.class_names)


def _task(raw: dict[str, Any]) -> Task:
    return Task(**schema.check("task", Task, raw.get("task", {})))


def _read(path: Path, sections: tuple[str, ...]) -> dict[str, Any]:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). Run 'protofed federation init' first.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from None
    unknown = [key for key in raw if key not in sections]
    if unknown:
        raise UserError(f"{path}: unknown section [{unknown[0]}]. There are: {', '.join(sections)}.")
    return raw
