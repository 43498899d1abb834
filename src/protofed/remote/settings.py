"""What an operator sets: federation.toml for the server, client.toml in a client's bundle, one experiment in both."""

import hashlib
import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from protofed.config import schema
from protofed.config.experiment import Experiment
from protofed.errors import UserError

ELSEWHERE = ("device", "engine")  # how and where it is computed: each side has its own
IN_BUNDLE = ("client", "task", "members")  # the sections of client.toml
MOST_SAMPLES = 10**9  # that any client may say it has


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
    keep: Annotated[int, Ge(2), Le(20)] = 5
    """Rounds whose state is kept, on the server and on every client: how far 'federation rollback' can go back."""


@dataclass(frozen=True)
class Bounds:
    """What is merged of a client, and when it is put out (the [bounds] section)."""

    action: Literal["refuse", "clip", "none"] = "refuse"
    """An upload beyond a bound is refused, clipped to the bound, or merged as it is."""
    factor: Annotated[float, Gt(1), Le(1_000_000)] = 5.0
    """The bound is this many times the members' median figure; protofed/remote/server/bounds.py says how."""
    prototype: Annotated[float, Ge(0)] = 0.0
    """Length of a prototype at most (of every row of an upload that has one per class); 0: by the factor."""
    change: Annotated[float, Ge(0)] = 0.0
    """Distance of an uploaded model from the one that was broadcast at most; 0: by the factor."""
    samples: Annotated[int, Ge(0)] = 0
    """Samples that a client may say it has, by which it is weighted and counted; 0: a billion."""
    refusals: Annotated[int, Ge(0)] = 5
    """A client that is refused so many times in a row is put out; 0: never."""


@dataclass(frozen=True)
class Task:
    """What all clients must agree on about the data (the [task] section), since the server has none."""

    shape: tuple[int, ...] = ()
    """Of one sample as a model gets it: (channels, height, width), or (features,)."""
    classes: tuple[str, ...] = ()
    """Their names, in the order of the labels."""


@dataclass(frozen=True)
class MemberSettings:
    """One client that may take part (a [[clients]] entry of federation.toml)."""

    number: Annotated[int, Ge(0)] = 0
    name: str = ""
    public_key: str = ""
    samples: Annotated[int, Ge(0)] = 0
    """Samples that this client may say it has; 0: what [bounds] says."""


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
    bounds: Bounds = field(default_factory=Bounds)
    task: Task = field(default_factory=Task)
    clients: tuple[MemberSettings, ...] = ()

    def name_of(self, number: int) -> str:
        return next((m.name for m in self.clients if m.number == number and m.name), f"client-{number:03d}")

    def most_samples(self, number: int) -> int:
        """How many samples a client may say it has."""
        own = next((m.samples for m in self.clients if m.number == number), 0)
        return own or self.bounds.samples or MOST_SAMPLES


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
    raw = _read(folder / "federation.toml", ("federation", "rounds", "bounds", "task", "clients"))
    members = tuple(
        MemberSettings(**schema.check_section("clients", MemberSettings, entry)) for entry in raw.get("clients", [])
    )
    numbers = [member.number for member in members]
    if len(set(numbers)) < len(numbers):
        raise UserError(f"{folder / 'federation.toml'}: a number is given to two [[clients]]. Give each its own.")
    kinds: dict[str, Any] = {"federation": Address, "rounds": Rounds, "bounds": Bounds, "task": Task}
    sections = {name: kind(**schema.check_section(name, kind, raw.get(name, {}))) for name, kind in kinds.items()}
    settings = FederationSettings(**sections, clients=members)
    if members and settings.rounds.minimum > len(members):
        raise UserError(
            f"rounds.minimum = {settings.rounds.minimum}, but there are {len(members)} clients. Use at most that many."
        )
    return settings


def load_client(bundle: Path) -> tuple[ClientSettings, Task]:
    """client.toml of a bundle, and the task where it says one."""
    raw = _read(bundle / "client.toml", IN_BUNDLE)
    task = Task(**schema.check_section("task", Task, raw.get("task", {})))
    return ClientSettings(**schema.check_section("client", ClientSettings, raw.get("client", {}))), task


def load_members(bundle: Path) -> dict[int, str]:
    """The public keys of all members in a bundle's client.toml, which secure sums need; by number."""
    entries = _read(bundle / "client.toml", IN_BUNDLE).get("members", [])
    members = [MemberSettings(**schema.check_section("members", MemberSettings, entry)) for entry in entries]
    if len({member.number for member in members}) < len(members):
        raise UserError(f"{bundle / 'client.toml'}: a number is given to two [[members]]. Get a present bundle.")
    return {member.number: member.public_key for member in members}


def load_experiment(folder: Path, agreed: str = "") -> Experiment:
    """experiment.toml of a server's folder or a bundle; `agreed` is the hash it must have."""
    experiment = Experiment.load(folder / "experiment.toml")
    if agreed and experiment_hash(experiment) != agreed:
        raise UserError(
            f"{folder / 'experiment.toml'} was changed after the federation was set up: its hash is "
            f"{experiment_hash(experiment)[:12]}, federation.toml says {agreed[:12]}. Restore it, or set up a new one."
        )
    return experiment


def _read(path: Path, sections: tuple[str, ...]) -> dict[str, Any]:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        below = next(
            (there.parent for depth in ("*", "*/*") for there in path.parent.glob(f"{depth}/{path.name}")), None
        )
        remedy = f"Name the folder that has one, such as {below}." if below else "Run 'protofed federation init' first."
        raise UserError(f"{path} cannot be read ({error.strerror}). {remedy}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from None
    unknown = [key for key in raw if key not in sections]
    if unknown:
        raise UserError(f"{path}: unknown section [{unknown[0]}]. There are: {', '.join(sections)}.")
    return raw
