"""`protofed federation init` and `rekey`: everything that an operator needs, in one folder."""

import dataclasses
import ipaddress
import re
import shutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from protofed.config.experiment import Experiment
from protofed.errors import UserError
from protofed.remote.build import task_of
from protofed.remote.flower.certificates import make_authority, make_client_key, make_server, write_private
from protofed.remote.settings import Rounds, Task, experiment_hash, load_federation
from protofed.robust.round import refuse_elsewhere
from protofed.runs.budget import check_plan
from protofed.runs.securesum import check_summable

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
PAGES = Path(__file__).with_name("pages")  # what is written for people and for systemd
SERVE = f"ExecStart={sys.executable} -m protofed server server"
TAKE_PART = (
    "# The data file and the model of this site:\n"
    f"ExecStart={sys.executable} -m protofed client . --data DATA --model MODEL --wait 300"
)


def members(words: str) -> list[str]:
    """Names of clients from '3' or 'north,south'."""
    if words.isdigit():
        if not 1 <= int(words) <= 10_000:
            raise UserError(f"--clients {words}: a number from 1 to 10000, or names: north,south.")
        return [f"client-{number:03d}" for number in range(int(words))]
    names = [name.strip() for name in words.split(",")]
    wrong = next((name for name in names if not NAME.fullmatch(name)), None)
    if wrong is not None:
        raise UserError(
            f"--clients: {wrong!r} is not a name for a client. Use letters, digits, dot, dash and underscore."
        )
    if len(set(names)) < len(names):
        raise UserError("--clients: a name is given twice. Give every client its own.")
    return names


def addresses(words: str) -> list[str]:
    """Host names and IP addresses from 'server.example.org,192.0.2.7'; clients use the first."""
    found = [word.strip() for word in words.split(",") if word.strip()]
    for host in found:
        if not _is_address(host) and not re.fullmatch(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", host):
            raise UserError(f"--host: {host!r} is neither a host name nor an address. Give what clients connect to.")
    if not found:
        raise UserError("--host: name what clients connect to, such as server.example.org or 192.0.2.7.")
    return found


def task(experiment: Experiment, shape: str | None, classes: str | None, data_dir: Path | None) -> Task:
    """What all agree on about the data: as told, else as in the experiment's data, which then must be here."""
    if shape is None and classes is None:
        try:
            return task_of(experiment, data_dir)
        except UserError as error:
            raise UserError(f"{error} Or say what the clients' data is like: --shape 1,28,28 --classes 10.") from None
    if shape is None or classes is None:
        raise UserError("--shape and --classes belong together: --shape 1,28,28 --classes cat,dog (or a number).")
    if not re.fullmatch(r"[1-9]\d{0,6}(,[1-9]\d{0,6}){0,2}", shape):
        raise UserError(f"--shape {shape}: give channels,height,width of a sample, or its number of features.")
    names = (
        [str(k) for k in range(int(classes))] if classes.isdigit() else [name.strip() for name in classes.split(",")]
    )
    if len(set(names)) < max(2, len(names)) or not all(names):
        raise UserError(f"--classes {classes}: give a number from 2 on, or different names with commas.")
    return Task(tuple(int(size) for size in shape.split(",")), tuple(names))


def init(
    folder: Path, *, names: Sequence[str], hosts: Sequence[str], port: int, experiment: Experiment, rounds: Rounds,
    task: Task,
) -> None:  # fmt: skip
    """Write a federation's folder; nothing where there is one already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"{folder} is there already, and keys are not overwritten. Choose another folder, or remove it."
        )
    refuse_elsewhere(experiment.attack)
    if experiment.privacy.secure_sum:
        check_summable(experiment, ())
    check_plan(experiment)
    if experiment.clients != len(names):
        raise UserError(
            f"the experiment has clients = {experiment.clients}, and {len(names)} are named. "
            f"Add clients={len(names)} to the command, or name {experiment.clients}."
        )
    if rounds.minimum > len(names):
        raise UserError(f"--minimum {rounds.minimum}: there are {len(names)} clients. Use at most that many.")
    scratch = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        _write(scratch, folder, names, hosts, port, experiment, rounds, task)
        if folder.exists():
            folder.rmdir()
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write(
    scratch: Path, folder: Path, names: Sequence[str], hosts: Sequence[str], port: int, experiment: Experiment,
    rounds: Rounds, task: Task,
) -> None:  # fmt: skip
    server, agreed = scratch / "server", experiment_hash(experiment)
    server.mkdir(parents=True, mode=0o700)
    plan = experiment.to_toml().encode()
    authority = make_authority(folder.resolve().name)
    made = make_server(authority, hosts)
    for name, content in {"ca.crt": authority.certificate, "ca.key": authority.key, "server.crt": made.certificate,
                          "server.key": made.key, "experiment.toml": plan}.items():  # fmt: skip
        write_private(server / name, content)
    where = f"[{hosts[0]}]:{port}" if ":" in hosts[0] else f"{hosts[0]}:{port}"
    common = {"task": _plain(task)} if task != Task() else {}
    keys = [make_client_key() for _ in names]
    entries = [
        {"number": number, "name": name, "public_key": key.certificate.decode().strip()}
        for number, (name, key) in enumerate(zip(names, keys, strict=True))
    ]
    secure = experiment.privacy.secure_sum  # then members check each other's keys
    for number, (name, key) in enumerate(zip(names, keys, strict=True)):
        bundle = scratch / "clients" / name
        bundle.mkdir(parents=True, mode=0o700)
        client: dict[str, Any] = {"client": {"number": number, "name": name, "server": where}} | common
        client |= {"members": entries} if secure else {}
        parts = {"client.toml": tomli_w.dumps(client).encode(), "experiment.toml": plan, "key": key.key,
                 "key.pub": key.certificate, "ca.crt": authority.certificate}  # fmt: skip
        for part, content in parts.items():
            write_private(bundle / part, content)
        _page("bundle.md", bundle / "README.md", name=name, server=where)
        unit = bundle / "protofed-client.service"
        _page("protofed.service", unit, what=f"client {name}", name=name, start=TAKE_PART, pause=10)
    settings: dict[str, Any] = {
        "federation": {"name": folder.resolve().name, "host": hosts[0], "port": port, "experiment": agreed},
        "rounds": _plain(rounds),
    }
    settings |= {"bounds": {"action": "none"}} if secure or experiment.privacy.noisy else {}
    settings |= common | {"clients": entries}
    write_private(server / "federation.toml", tomli_w.dumps(settings).encode())
    name, unit = folder.resolve().name, scratch / "protofed-server.service"
    _page("protofed.service", unit, what=f"server of {name}", name=name, start=SERVE, pause=5)
    _page("federation.md", scratch / "README.md", name=name, folder=folder, server=where, port=port, first=names[0])


def _page(source: str, to: Path, **told: object) -> None:
    """Write one of PAGES with these words filled in."""
    to.write_text((PAGES / source).read_text(encoding="utf-8").format(**told), encoding="utf-8")


def rekey(server: Path, name: str) -> Path:
    """A new key pair for a client, where its bundle is or was; the server lets the old key in until it starts again."""
    path = server / "federation.toml"
    federation = load_federation(server)
    known = {federation.name_of(member.number): member.number for member in federation.clients}
    if name not in known:
        raise UserError(f"{path} names no client {name!r}. It has {', '.join(known)}.")
    settings, made = tomllib.loads(path.read_text(encoding="utf-8")), make_client_key()
    bundle = server.resolve().parent / "clients" / name
    bundle.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(bundle / "key", made.key)
    write_private(bundle / "key.pub", made.certificate)
    for entry in settings["clients"]:
        if entry.get("number", 0) == known[name]:
            entry["public_key"] = made.certificate.decode().strip()
    write_private(path, tomli_w.dumps(settings).encode())
    for other in bundle.parent.glob("*/client.toml"):
        _list_key(other, known[name], made.certificate.decode().strip())
    return bundle


def _list_key(path: Path, number: int, public: str) -> None:
    """Where a bundle lists the members' keys, list this one."""
    told = tomllib.loads(path.read_text(encoding="utf-8"))
    if "members" in told:
        for entry in told["members"]:
            if entry.get("number", 0) == number:
                entry["public_key"] = public
        write_private(path, tomli_w.dumps(told).encode())


def _plain(settings: Any) -> dict[str, Any]:
    """A dataclass as TOML knows it."""
    return {
        key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(settings).items()
    }


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
