"""Set up and operate a real federation between machines.

It runs on Flower (pip install 'protofed[flower]').
"""

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from protofed.cli.common import DataDir, Overrides, Trust, console, note, say
from protofed.cli.lazy import Known

federation = typer.Typer(cls=Known, no_args_is_help=True, rich_markup_mode=None, help=__doc__)
Folder = Annotated[Path, typer.Argument(help="The federation's folder.")]
ClientName = Annotated[str, typer.Argument(metavar="NAME", help="The client's name, as in 'federation status'.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Without TLS and keys: for trials on one machine only.")]


@federation.command()
def init(
    folder: Annotated[
        Path, typer.Argument(help="A new folder for the keys and settings of the server and all clients.")
    ],
    overrides: Overrides = None,
    clients: Annotated[str, typer.Option(help="How many, or their names: north,south,west.")] = ...,  # type: ignore[assignment]
    host: Annotated[str, typer.Option(help="Names or addresses that clients connect to, separated by commas.")] = ...,  # type: ignore[assignment]
    experiment: Annotated[str, typer.Option(help="A .toml file, or a shipped experiment's name.")] = ...,  # type: ignore[assignment]
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the server.")] = 8443,
    minimum: Annotated[int, typer.Option(min=1, help="A round needs at least this many clients.")] = 1,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds a client has to answer in a round.")] = 600.0,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for all clients before the first round.")] = 0.0,
    shape: Annotated[str | None, typer.Option(help="Shape of a sample, if the data is not here: 1,28,28.")] = None,
    classes: Annotated[
        str | None, typer.Option(help="Classes, if the data is not here: how many, or their names.")
    ] = None,
    trust: Trust = False,
    data_dir: DataDir = None,
) -> None:
    """Write all that a server and its clients need.

    These are keys, certificates, settings, systemd units and a read-me.

    Examples:

      protofed federation init hospitals --clients north,south,west --host fed.example.org --experiment my.toml

      protofed federation init trial --clients 3 --host 127.0.0.1 --experiment demo clients=3 rounds=5
    """
    from protofed.remote.flower import setup
    from protofed.remote.settings import Rounds
    from protofed.runs.trust import remember, trusted_experiment

    names, hosts = setup.members(clients), setup.addresses(host)
    plan = trusted_experiment(experiment, f"clients={len(names)}", *(overrides or []), trust=trust, tell=note)
    task = setup.task(plan, shape, classes, data_dir)
    rounds = Rounds(minimum=minimum, deadline_s=deadline, wait_s=wait)
    setup.init(folder, names=names, hosts=hosts, port=port, experiment=plan, rounds=rounds, task=task)
    remember(plan, folder, note)  # clients that are tried out on this machine run the operator's own code
    say(
        f"the federation in {folder} is set up: {len(names)} clients, and a server at {hosts[0]}:{port}.\n"
        f"  server:  protofed server {folder}/server\n"
        f"  clients: copy {folder}/clients/NAME to its machine; there: protofed client NAME --data FILE --model MODEL\n"
        f"See {folder}/README.md."
    )


@federation.command()
def renew(
    folder: Folder,
    host: Annotated[str | None, typer.Option(help="New names or addresses, separated by commas.")] = None,
) -> None:
    """Make a new server certificate. Clients need no change, and a running server uses it at once."""
    from protofed.remote.flower import certificates, setup
    from protofed.remote.flower.operate import server_folder

    names = certificates.renew(server_folder(folder), setup.addresses(host) if host else None)
    say(f"a new certificate for {', '.join(names)}, valid for {certificates.SERVER_DAYS} days")


@federation.command()
def rekey(
    folder: Folder, client: ClientName
) -> None:  # fmt: skip
    """Make a new key pair for a client. The old key is then refused."""
    from protofed.remote.flower import setup
    from protofed.remote.flower.operate import server_folder
    from protofed.remote.settings import load_members

    bundle = setup.rekey(server_folder(folder), client)
    say(
        f"a new key for {client} is in {bundle}. Restart the server, which then refuses the old one; put key and "
        f"key.pub into the client's bundle by a way that nobody else can read, and start the client again."
    )
    if (bundle / "client.toml").is_file() and load_members(bundle):
        say(
            "privacy.secure_sum: all members need the new client.toml of their bundles, and have to start again; until "
            f"then {client} takes part in no sum."
        )


@federation.command()
def start(
    folder: Folder,
    insecure: Insecure = False,
    with_clients: Annotated[
        Path | None, typer.Option(help="For trials: also start all clients here, each with NAME.npz from this folder.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="With --with-clients: the clients' models, separated by commas, dealt in turn."),
    ] = None,
) -> None:
    """Start the server in the background of this machine."""
    from protofed.config.registry import check_model
    from protofed.importing import is_path

    models = [name for word in model or [] for name in word.split(",")]
    for name in models:
        if not is_path(name):  # before any process starts: a client's own error would be in its log alone
            check_model(name)
    from protofed.remote.flower import operate

    operate.start(folder, insecure=insecure, clients=with_clients, models=models, tell=say)


@federation.command()
def stop(folder: Folder) -> None:
    """Stop the processes of a federation on this machine. 'start' continues where they stopped."""
    from protofed.remote.flower import operate

    operate.stop(folder, say)


@federation.command()
def status(
    folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:  # fmt: skip
    """Show rounds, clients and processes."""
    from protofed.remote.flower import operate

    found = operate.federation_report(folder)
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
    if "uploads" in own:
        say(f"uploads are {own['uploads']}")
    say(f"the certificate is valid for another {found['certificate_days']:.0f} days")
    table = Table("client", "state", "samples", "model", "last seen", "reason")
    for client in own.get("clients", []):
        seen = client["last_seen"] and time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(client["last_seen"]))
        known = [client[key] for key in ("name", "state", "samples", "architecture")]
        shown = (*known, seen, client["last_reason"])
        table.add_row(*(Text("-" if part is None else str(part)) for part in shown))  # no markup in others' words
    if own.get("clients"):
        console.print(table)
    for line in operate.events(own):
        console.print(Text(line), soft_wrap=True)


@federation.command()
def ban(
    folder: Folder, client: ClientName, reason: Annotated[str, typer.Option(help="Why, for the log.")] = ""
) -> None:  # fmt: skip
    """Exclude a client.

    Nothing that it sends is merged any more. The server may be running or stopped.
    """
    from protofed.remote.flower import operate

    say(operate.put_out(folder, client, reason))


@federation.command()
def unban(folder: Folder, client: ClientName) -> None:
    """Let a client back in that you or the server excluded."""
    from protofed.remote.flower import operate

    say(operate.let_in(folder, client))


@federation.command()
def rollback(
    folder: Folder,
    round: Annotated[int, typer.Option(min=0, help="Continue from the state after this round.")] = ...,  # type: ignore[assignment]
) -> None:
    """Go back to the state after an earlier round.

    Later rounds are repeated. The server may be running or stopped.
    """
    from protofed.remote.flower import operate

    say(operate.roll_back(folder, round))


@federation.command()
def log(
    folder: Folder,
    verify: Annotated[bool, typer.Option("--verify", help="Check the chain of hashes; exit code 2 if broken.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the lines unchanged.")] = False,
    head: Annotated[str | None, typer.Option(help="With --verify: a head that you wrote down earlier.")] = None,
) -> None:  # fmt: skip
    """Show the log: joins, refusals, bans, rollbacks.

    It also has hashes of all messages, settings and versions.
    """
    from protofed.remote.flower import operate

    if verify or head:
        say(operate.verified(folder, head))
        return
    for line in operate.log_lines(folder, as_json):
        console.print(Text(line), soft_wrap=True)
