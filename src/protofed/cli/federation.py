"""`protofed federation`"""

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from protofed.cli.common import DataDir, Overrides, console, say

federation = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None,
    help="Set up and operate a real federation, between machines, on Flower ('pip install protofed[flower]').",
)  # fmt: skip
Folder = Annotated[Path, typer.Argument(help="The federation's folder.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Without TLS and keys: for trials on one machine only.")]


@federation.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new folder, for keys and settings of the server and all clients.")],
    overrides: Overrides = None,
    clients: Annotated[str, typer.Option(help="How many, or their names: north,south,west.")] = ...,  # type: ignore[assignment]
    host: Annotated[str, typer.Option(help="What clients connect to: a name or address; more after commas.")] = ...,  # type: ignore[assignment]
    experiment: Annotated[str, typer.Option(help="A .toml file, or a shipped experiment's name.")] = ...,  # type: ignore[assignment]
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the server.")] = 8443,
    minimum: Annotated[int, typer.Option(min=1, help="Clients without which a round neither begins nor counts.")] = 1,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds that a client has for a round.")] = 600.0,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for all clients before the first round.")] = 0.0,
    shape: Annotated[str | None, typer.Option(help="Of a sample, where the data is not here: 1,28,28.")] = None,
    classes: Annotated[str | None, typer.Option(help="Where the data is not here: how many, or names.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Write all that a server and its clients need: keys, certificates, settings, systemd units, a read-me.

    Examples:

      protofed federation init hospitals --clients north,south,west --host fed.example.org --experiment my.toml

      protofed federation init trial --clients 3 --host 127.0.0.1 --experiment demo clients=3 rounds=5
    """
    from protofed.experiment import Experiment
    from protofed.federation.settings import Rounds
    from protofed.flower import setup

    names, hosts = setup.members(clients), setup.addresses(host)
    plan = Experiment.load(experiment, f"clients={len(names)}", *(overrides or []))
    task = setup.task(plan, shape, classes, data_dir)
    rounds = Rounds(minimum=minimum, deadline_s=deadline, wait_s=wait)
    setup.init(folder, names=names, hosts=hosts, port=port, experiment=plan, rounds=rounds, task=task)
    say(
        f"{folder} is set up for {len(names)} clients of {hosts[0]}:{port}.\n"
        f"  server:  protofed server {folder}/server\n"
        f"  clients: copy {folder}/clients/NAME to its machine; there: protofed client NAME --data FILE --model MODEL\n"
        f"See {folder}/README.md."
    )


@federation.command()
def renew(
    folder: Folder,
    host: Annotated[str | None, typer.Option(help="Other names or addresses than it was for, with commas.")] = None,
) -> None:
    """Make a new server certificate with the same authority: clients need nothing, a running server takes it."""
    from protofed.flower import certificates, setup
    from protofed.flower.operate import server_folder

    names = certificates.renew(server_folder(folder), setup.addresses(host) if host else None)
    say(f"a new certificate for {', '.join(names)}, valid for {certificates.SERVER_DAYS} days")


@federation.command()
def rekey(
    folder: Folder, client: Annotated[str, typer.Argument(help="Its name, as in 'federation status'.")]
) -> None:  # fmt: skip
    """Make a new key pair for a client whose key is lost or leaked: the old one is let in no longer."""
    from protofed.flower import setup
    from protofed.flower.operate import server_folder

    bundle = setup.rekey(server_folder(folder), client)
    say(
        f"a new key for {client} is in {bundle}. Restart the server, which then refuses the old one; put key and "
        f"key.pub into the client's bundle by a way that nobody else can read, and start the client again."
    )


@federation.command()
def start(
    folder: Folder,
    insecure: Insecure = False,
    with_clients: Annotated[
        Path | None, typer.Option(help="Also start all clients here, each with NAME.npz of this folder: for trials.")
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="With it: their models, dealt in turn.")] = None,
) -> None:
    """Start the server in the background of this machine."""
    from protofed.flower import operate

    operate.start(folder, insecure=insecure, clients=with_clients, models=model or [], tell=say)


@federation.command()
def stop(folder: Folder) -> None:
    """End what runs here of a federation; 'start' goes on where it stopped."""
    from protofed.flower import operate

    operate.stop(folder, say)


@federation.command()
def status(
    folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False
) -> None:  # fmt: skip
    """Rounds, clients and processes."""
    from protofed.flower import operate

    found = operate.report(folder)
    if as_json:
        say(json.dumps(found, indent=1))
        return
    own = found["status"]
    running = "running" if found["running"] else "not running"
    say(f"{found['name']} at {found['address']}: {own.get('phase', 'not begun')}, "
        f"round {own.get('round', 0)} of {own.get('rounds', '?')}; the server is {running}")  # fmt: skip
    dead = [name for name, process in found["processes"].items() if not process["alive"]]
    if dead:
        say(f"not alive: {', '.join(dead)}")
    say(f"the certificate is valid for another {found['certificate_days']:.0f} days")
    table = Table("client", "state", "samples", "model", "last seen", "reason")
    for client in own.get("clients", []):
        seen = client["last_seen"] and time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(client["last_seen"]))
        shown = (client["samples"], client["architecture"], seen, client["last_reason"])
        table.add_row(client["name"], client["state"], *("-" if part is None else str(part) for part in shown))
    if own.get("clients"):
        console.print(table)
    for refused in own.get("refused", [])[-5:]:
        say(f"refused in round {refused['round']}: {refused['client']}: {refused['reason']}")
