"""The server: waits for clients, runs the rounds, and writes the run's folder and status.json."""

import json
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from protofed.atomic import write_atomically
from protofed.errors import UserError
from protofed.experiment import Experiment
from protofed.federation.build import empty_split, no_client, server_domain
from protofed.federation.remote import RemoteEngine
from protofed.federation.roster import Roster
from protofed.federation.settings import FederationSettings, load_experiment, load_federation, task_of
from protofed.federation.status import Status
from protofed.federation.transport import Transport
from protofed.folder import RunFolder
from protofed.prepare import Prepared, check_phases
from protofed.progress import describe
from protofed.results import Result, Watch
from protofed.run import carry_out


def serve(folder: Path, transport: Transport, tell: Callable[[str], None], *, pause: float = 1.0) -> Result:
    """Run the federation of a server's folder to its end, from where it stopped.

    `pause`: seconds between two looks at who is there, while waiting.
    """
    settings = load_federation(folder)
    agreed = load_experiment(folder, settings.federation.experiment)
    settings = settings if settings.task.classes else replace(settings, task=task_of(agreed))
    experiment, notes = served(agreed)
    _check_numbers(settings, experiment)
    run = RunFolder(folder / "run")
    run.check(experiment, resume=True)
    status = Status.of(folder / "status.json", tell, settings, experiment.clients, experiment.rounds)
    if run.finished:
        status.be("finished", experiment.rounds)
        return Result(run.path, run.summary())
    domain = server_domain(folder, experiment, settings.task)
    here = no_client(experiment, domain)
    experiment.method.check(here.specs())
    check_phases(experiment, here)
    roster = Roster(transport, settings, agreed, here, _run_name(folder, run), status)
    engine = RemoteEngine(experiment, here, roster, status, settings.rounds, pause)
    prepared = Prepared([domain], empty_split(experiment.clients), engine, notes, data_here=False)
    try:
        result = carry_out(experiment, run, prepared, _Telling(status), engine.stop, checkpoint_seconds=0)
    except BaseException as error:
        status.be("stopped" if not isinstance(error, UserError) else f"failed: {error}")
        raise
    status.be("finished", experiment.rounds)
    return result


def served(experiment: Experiment) -> tuple[Experiment, tuple[str, ...]]:
    """The experiment without what would need clients' samples here, and what was left out."""
    left_out = {
        "evaluate.theory": experiment.evaluate.theory,
        "evaluate.pm": experiment.evaluate.pm,
        "record.snapshots": experiment.record.enabled and experiment.record.snapshots,
    }
    evaluate = replace(experiment.evaluate, theory=0, pm=0)
    notes = [f"{key} is left out: clients keep their samples" for key, value in left_out.items() if value]
    return replace(experiment, evaluate=evaluate, record=replace(experiment.record, snapshots=0)), tuple(notes)


def _check_numbers(settings: FederationSettings, experiment: Experiment) -> None:
    beyond = [member.number for member in settings.clients if member.number >= experiment.clients]
    if beyond:
        raise UserError(
            f"federation.toml lists client {beyond[0]}, but the experiment has clients = {experiment.clients}, counted "
            "from 0. Change clients, and give every client its new bundle."
        )
    many = len(settings.clients) or experiment.clients
    if settings.rounds.minimum > many:
        raise UserError(
            f"rounds.minimum = {settings.rounds.minimum}, but there are {many} clients. Use {many} or less."
        )


def _run_name(folder: Path, run: RunFolder) -> str:
    """A name by which clients tell a run that goes on from one that begins."""
    path = folder / "run.json"
    if run.exists and path.is_file():
        name: str = json.loads(path.read_text(encoding="utf-8"))["run"]
        return name
    name = secrets.token_hex(8)
    write_atomically(path, (json.dumps({"run": name}) + "\n").encode())
    return name


class _Telling(Watch):
    """A line for every round and every note."""

    def __init__(self, status: Status) -> None:
        self.status = status

    def round(self, line: dict[str, Any]) -> None:
        left = f"round {line['round']} of {self.status.rounds}: {line['clients']} clients, {describe(line)}"
        self.status.tell(f"{left}, {line['seconds']:.1f} s")

    def note(self, text: str) -> None:
        self.status.tell(text)
