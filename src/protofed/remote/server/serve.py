"""The server: waits for clients, runs the rounds, and writes the run's folder and status.json."""

import contextlib
import hashlib
import json
import platform
import secrets
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from protofed.atomic import write_atomically
from protofed.config.experiment import Experiment
from protofed.engines.wire import encode
from protofed.errors import UserError
from protofed.privacy.graph import needed
from protofed.remote.build import empty_split, no_client, server_domain, task_of
from protofed.remote.protocol import one_line
from protofed.remote.server.audit import Audit
from protofed.remote.server.engine import RemoteEngine
from protofed.remote.server.ledger import Ledger
from protofed.remote.server.noised import NoisedEngine, ToldReleases
from protofed.remote.server.orders import GoBack, carry_out_all, roll_back_run, sole_judge, waiting_orders
from protofed.remote.server.roster import Roster
from protofed.remote.server.status import SINGLY, Status, last_head
from protofed.remote.settings import FederationSettings, load_experiment, load_federation
from protofed.remote.transport import Transport
from protofed.robust.round import refuse_elsewhere
from protofed.runs.budget import check_budget
from protofed.runs.checks import check_phases
from protofed.runs.cohort import draw_cohort
from protofed.runs.folder import RunFolder, State
from protofed.runs.loop import carry_out
from protofed.runs.measure import Result
from protofed.runs.probes import NO_PROBES, Probes
from protofed.runs.progress import describe_round
from protofed.runs.robustness import check_rule
from protofed.runs.setup import MakeReleases, Prepared
from protofed.runs.watch import Watch
from protofed.version import VERSION


def serve(
    folder: Path,
    transport: Transport,
    tell: Callable[[str], None],
    *,
    pause: float = 1.0,
    probes: Probes = NO_PROBES,
) -> Result:
    """Run the federation of a server's folder to its end, from where it stopped.

    `pause`: seconds between two looks at who is there, while waiting; `probes`: what is drawn when it is over.
    """
    settings = load_federation(folder)
    agreed = load_experiment(folder, settings.federation.experiment)
    settings = settings if settings.task.classes else replace(settings, task=task_of(agreed))
    with sole_judge(folder):
        return _serve(folder, transport, tell, settings, agreed, pause, probes)


def _serve(
    folder: Path,
    transport: Transport,
    tell: Callable[[str], None],
    settings: FederationSettings,
    agreed: Experiment,
    pause: float,
    probes: Probes,
) -> Result:
    experiment, notes = served(agreed)
    refuse_elsewhere(experiment.attack)
    refuse_simulated(experiment)
    _check_numbers(settings, experiment)
    audit = Audit(folder / "audit.jsonl")
    if wrong := audit.check(last_head(folder / "status.json")):
        tell(f"{folder / 'audit.jsonl'} is not as the server left it: {wrong}. The log goes on, and says so")
    run = _Noted(folder / "run", settings.rounds.keep, audit)
    run.check(experiment, resume=True)
    carry_out_all(folder, audit, tell)
    status = Status.of(folder / "status.json", tell, settings, experiment.clients, experiment.rounds, audit)
    status.uploads = _seen(experiment)
    if run.finished:
        status.be("finished", experiment.rounds)
        return Result(run.path, run.summary())
    domain = server_domain(folder, experiment, settings.task)
    here = no_client(experiment, domain, tell)
    experiment.method.check(here.specs())
    check_phases(experiment, here)
    check_rule(experiment, here)
    check_budget(experiment, here)
    _check_bounds(settings, experiment)
    roster = Roster(transport, settings, agreed, here, _run_name(folder, run), status)
    audit.add("server started", **_started(folder, settings, experiment, roster))
    try:
        result = None
        while result is None:
            engine = _engine(experiment)(experiment, here, roster, status, settings.rounds, pause, folder)
            prepared = Prepared([domain], empty_split(experiment.clients), engine, notes, data_here=False)
            if experiment.privacy.noisy:
                prepared = prepared._replace(releases=_told(experiment, engine))
            try:
                result = carry_out(experiment, run, prepared, _Telling(status), engine.stop, 0, probes=probes)
            except GoBack as back:
                _go_back(folder, run, status, roster, back.round)
        status.log("finished", rounds=experiment.rounds)
        status.be("finished", experiment.rounds)
    except BaseException as error:
        status.log("server stopped", reason=one_line(error) or type(error).__name__)
        status.be("stopped" if not isinstance(error, UserError) else f"failed: {error}")
        raise
    finally:
        audit.close()
    return result


def _engine(experiment: Experiment) -> type[RemoteEngine]:
    if not experiment.privacy.secure_sum:
        return NoisedEngine if experiment.privacy.noisy else RemoteEngine
    from protofed.remote.server.masked import MaskedEngine  # needs the packages of secure sums

    return MaskedEngine


def _told(experiment: Experiment, engine: RemoteEngine) -> MakeReleases:
    return lambda folder, rounds, tell: ToldReleases(experiment, engine, folder, rounds, tell)


def _seen(experiment: Experiment) -> str:
    """How the server sees uploads, for status.json."""
    privacy = experiment.privacy
    noised = f", noised, epsilon {privacy.epsilon:g} for the run" if privacy.noisy else ""
    if not privacy.secure_sum:
        return SINGLY + noised
    least = needed(privacy.threshold, len(draw_cohort(experiment, 0)))
    return f"seen only in sums over at least {least} clients{noised}"


def _check_bounds(settings: FederationSettings, experiment: Experiment) -> None:
    privacy = experiment.privacy
    if (privacy.secure_sum or privacy.noisy) and settings.bounds.action != "none":
        why = "privacy.secure_sum hides them" if privacy.secure_sum else "[privacy] noises them"
        raise UserError(
            f"bounds.action = {settings.bounds.action!r} judges the uploads of single clients, and {why}. "
            'Write action = "none" under [bounds] in federation.toml.'
        )


def _go_back(folder: Path, run: "_Noted", status: Status, roster: Roster, round: int) -> None:
    """Between two rounds: by order of the operator, or because the last round was taken back."""
    if any(one.kind == "rollback" for one in waiting_orders(folder)):
        carry_out_all(folder, run.audit, status.tell)
        status.ledger = Ledger.of(folder / "ledger.json")
        for number in status.ledger.out:  # bans that came after the rollback
            roster.put_out(number)
        roster.let_in()
    else:
        roll_back_run(run, status.ledger, status.log, round, "the server", status.tell)


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


def refuse_simulated(experiment: Experiment) -> None:
    """Refuse what only a simulation can do: change clients' samples, or choose clients by what is not known yet."""
    if experiment.skew.on:
        raise UserError(
            "[skew] changes clients' samples in simulations, and this is a real federation. Remove it from the "
            "experiment."
        )
    if experiment.stragglers.on:
        raise UserError(
            "[stragglers] slows clients of simulations down, and those of a real federation are as slow as they are. "
            "Remove it from the experiment; rounds.deadline_s in federation.toml ends a round."
        )
    if experiment.incremental.on:
        raise UserError(
            "[incremental] gives clients their classes one after another in simulations, and this is a real "
            "federation. Remove it from the experiment."
        )
    if experiment.selection.rule != "random":
        raise UserError(
            f"selection.rule = {experiment.selection.rule!r} is for simulations, and this is a real federation: its "
            "rounds take who is there. Remove [selection] from the experiment."
        )


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


def _started(folder: Path, settings: FederationSettings, experiment: Experiment, roster: Roster) -> dict[str, Any]:
    """With what a server begins: versions, the experiment's hash, and all settings but keys."""
    versions = {}
    for name in ("torch", "flwr"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "run": roster.run,
        "experiment": roster.hash,
        "versions": {"protofed": VERSION, "python": platform.python_version(), **versions},
        "settings": {key: asdict(getattr(settings, key)) for key in ("federation", "rounds", "bounds", "task")},
        "clients": {m.name: hashlib.sha256(m.public_key.encode()).hexdigest()[:16] for m in settings.clients},
        "federation.toml": hashlib.sha256((folder / "federation.toml").read_bytes()).hexdigest(),
    }


class _Noted(RunFolder):
    """A run's folder whose checkpoints are noted in the audit log."""

    def __init__(self, path: Path, keep: int, audit: Audit) -> None:
        super().__init__(path, keep)
        self.audit = audit

    def save(self, state: State) -> None:
        super().save(state)
        digest = hashlib.sha256(encode(state.server, whole=True)).hexdigest()
        self.audit.add("round kept", round=state.round, server=digest, finished=state.totals["finished"])


class _Telling(Watch):
    """A line for every round and every note."""

    def __init__(self, status: Status) -> None:
        self.status = status

    def round(self, line: dict[str, Any]) -> None:
        left = f"round {line['round']} of {self.status.rounds}: {line['clients']} clients, {describe_round(line)}"
        self.status.tell(f"{left}, {line['seconds']:.1f} s")

    def note(self, text: str) -> None:
        self.status.tell(text)
