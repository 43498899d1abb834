"""The round loop: broadcast, train, merge, aggregate, measure, and keep what is needed to continue."""

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from protofed.config.experiment import Experiment
from protofed.engines import Engine, Trained
from protofed.errors import UserError, option
from protofed.robust.round import Uploads
from protofed.runs.checkpoints import CHECKPOINT_SECONDS, Checkpoints
from protofed.runs.compiling import choose_compiling
from protofed.runs.folder import RunFolder, State
from protofed.runs.forgetting import Tasks
from protofed.runs.interrupt import on_interrupt
from protofed.runs.measure import Result, finish, refuse_nan, round_numbers
from protofed.runs.opening import open_or_go_on
from protofed.runs.probes import NO_PROBES, Probes
from protofed.runs.record import Recorder
from protofed.runs.releases import Releases
from protofed.runs.robustness import attackers_of
from protofed.runs.securesum import SecureRounds
from protofed.runs.selection import Selector
from protofed.runs.setup import Prepared, names_of_clients, prepare, working
from protofed.runs.stopping import Stopper
from protofed.runs.watch import Watch


class Interrupted(Exception):
    """The user stopped the run; everything up to the last whole round is saved."""


def run(
    experiment: Experiment,
    out: str | Path,
    *,
    resume: bool = False,
    data_dir: str | Path | None = None,
    watch: Watch | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    client_bytes: int | None = None,
    cores: int | None = None,
    prepared: Prepared | None = None,
    probes: Probes = NO_PROBES,
) -> Result:
    """Run an experiment into a folder, or go on with one that was stopped.

    `prepared` is what `prepare` gave for this experiment, where data or modules are handed in; None: done here.

    `client_bytes` is how much memory client states may take, beside those of one round; None: a part of what is free.
    `cores` is how many there are for it where engine.threads leaves that open; None: all.
    `probes` say what is checked, measured and drawn in addition to training.
    """
    if not isinstance(experiment, Experiment):
        raise UserError(f"experiment is {type(experiment).__name__}. Load one first, as in Experiment.load('demo').")
    watch = watch or Watch()
    folder = RunFolder(Path(out))
    folder.check(experiment, resume)
    if folder.finished:
        return Result(folder.path, folder.summary())
    if prepared is None:
        where = Path(data_dir) if data_dir is not None else None
        prepared = prepare(experiment, where, cores=cores, tell=watch.note, probes=probes)
    return carry_out(experiment, folder, prepared, watch, threading.Event(), checkpoint_seconds, client_bytes, probes)


def carry_out(
    experiment: Experiment,
    folder: RunFolder,
    prepared: Prepared,
    watch: Watch,
    stop: threading.Event,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    client_bytes: int | None = None,
    probes: Probes = NO_PROBES,
) -> Result:
    """The rest of a run whose clients are ready, in this process or elsewhere; `stop` ends it after a round."""
    told = watch.note
    with _disk(folder), working(experiment, prepared.engine, told), folder.locked(), on_interrupt(_ask(watch, stop)):
        state = open_or_go_on(folder, experiment, prepared, watch, client_bytes, probes)
        releases = releases_of(experiment, prepared, folder, state, watch)
        choose_compiling(experiment, prepared.engine, state.server, folder, watch.note)
        recorder = Recorder(folder, experiment, prepared.engine, state.round, watch.note)
        watch.opened(folder.path)
        watch.start(experiment, state.round)
        try:
            state = _rounds(
                folder, experiment, prepared, state, recorder, watch, stop, checkpoint_seconds, probes, releases
            )
            result = finish(folder, experiment, prepared, state, watch, stop, probes, releases)
            if not experiment.record.models:
                folder.drop_checkpoints()
            return result
        except KeyboardInterrupt:  # all rounds are saved, only the end is missing
            raise Interrupted("stopped while measuring every client") from None
        finally:
            state.clients.close()
            watch.end()


def _rounds(
    folder: RunFolder,
    experiment: Experiment,
    prepared: Prepared,
    state: State,
    recorder: Recorder,
    watch: Watch,
    stop: threading.Event,
    checkpoint_seconds: float,
    probes: Probes,
    releases: Releases | None,
) -> State:
    """Every round that is left, as far as a privacy budget pays for it."""
    method, engine = experiment.method, prepared.engine
    names = names_of_clients(prepared)
    checkpoints = Checkpoints(folder, experiment, state.round, watch, checkpoint_seconds)
    uploads = uploads_of(experiment, engine) if releases is None else None
    secure = SecureRounds(experiment, engine, uploads.sent, watch.note) if uploads is not None else None
    engine.clients = state.clients
    selector, stopper = Selector(experiment, engine, prepared.choose), Stopper(experiment, state.server)
    tasks = Tasks(experiment, prepared)
    engine.clock.take()  # what was tried before the first round does not count
    try:
        for round in range(state.round, experiment.rounds):
            started = engine.clock.now()
            state.clients.begin(round + 1)
            if why := stopper.why(round, state.totals):
                return _ended(folder, state, engine, watch, why)
            cohort = selector.cohort(round, state.totals)
            if releases is not None and not releases.enough(cohort, round):
                return _ended(folder, state, engine, watch, _out_of_budget(experiment, state, releases))
            state.clients.fetch(cohort)
            trained = engine.train(method, state.server, cohort, round)
            cohort = cohort if trained.answered is None else list(trained.answered)
            for note in engine.notes:
                watch.note(note)
            engine.notes.clear()
            refuse_nan(experiment, folder, state, trained, cohort, names, f"in round {round + 1}")
            if releases is not None:
                with engine.clock.part("noise"):
                    train = partial(engine.train, method, state.server, cohort, round)
                    noised = releases.noised(trained, cohort, round, state.server, train)
                if noised is None:
                    return _ended(folder, state, engine, watch, _out_of_budget(experiment, state, releases))
                trained = noised
            with engine.clock.part("aggregate"):
                if secure is not None:
                    trained = secure.summed(trained, cohort, round, state.centres)
                server, centres = next_server(experiment, state.server, trained, cohort, uploads, round, state.centres)
            train_seconds = engine.clock.now() - started

            probed = probes.round(experiment, engine, (state.server, server), cohort, round, trained)
            engine.clients.update(trained.clients)
            with engine.clock.part("evaluate"):
                numbers = round_numbers(experiment, engine, server, cohort, round + 1)
                numbers |= tasks.line(server, round + 1)
            numbers |= recorder.round(state.server, server, round + 1)
            parts = engine.clock.take()
            seconds = engine.clock.now() - started
            line: dict[str, Any] = {
                "round": round + 1,
                "clients": len(cohort),
                "lr": experiment.scheduled.rate(round),
                "loss": _mean_loss(trained),
                **numbers,
                **probed,
                **({} if releases is None else releases.line(round)),
                "params_up": trained.sent.params,
                "bytes_up": trained.sent.bytes,
                "bytes_down": trained.received.bytes,
                "bytes_up_by": trained.sent.kinds,
                "bytes_down_by": trained.received.kinds,
                "seconds_train": train_seconds,
                "seconds": seconds,
                "parts": _parts(parts, seconds),
            }
            totals = _totals(state.totals, line, cohort) | stopper.remembered(state.totals, line)
            totals |= selector.remembered(state.totals, trained, cohort)
            after = State(round + 1, server, state.clients, totals, centres)
            folder.append_round(line)  # a line too many is cut when resuming; one too few could not be mended
            state = after
            watch.round(line)
            if stop.is_set():
                raise KeyboardInterrupt
            checkpoints.after(state)
    except KeyboardInterrupt:
        folder.save(state)
        raise Interrupted(f"stopped after round {state.round} of {experiment.rounds}") from None
    return state


def releases_of(
    experiment: Experiment, prepared: Prepared, folder: RunFolder, state: State, watch: Watch
) -> Releases | None:
    """What a run with a privacy budget releases."""
    if not experiment.privacy.noisy:
        return None
    if prepared.releases is not None:
        return prepared.releases(folder.path, state.round, watch.note)
    return Releases(experiment, prepared.reference, folder.path, state.round, watch.note)


def _ended(folder: RunFolder, state: State, engine: Engine, watch: Watch, why: str) -> State:
    """The run ends before its last round."""
    watch.note(why)
    folder.save(state)
    engine.ended()
    return state


def _out_of_budget(experiment: Experiment, state: State, releases: Releases) -> str:
    """Why the run ends before a round: its budget does not pay for it."""
    return (
        f"stopped after round {state.round} of {experiment.rounds}: epsilon {releases.epsilon():.4g} is spent, and "
        f"another round would take it over privacy.epsilon = {experiment.privacy.epsilon:g}"
    )


def uploads_of(experiment: Experiment, engine: Engine) -> Uploads:
    """How a run's uploads are combined."""
    attackers = attackers_of(experiment, engine.samples(range(experiment.clients))) if experiment.attack.on else ()
    return Uploads(experiment.robust, experiment.attack, experiment.seed, engine.specs()[0].classes, attackers)


def next_server(
    experiment: Experiment,
    server: Any,
    trained: Trained,
    cohort: Sequence[int],
    uploads: Uploads | None,
    round: int,
    centres: Any = (),
) -> tuple[Any, Any]:
    """The server after a round, and what a robust rule remembers; both are unchanged if nobody had data. `uploads`: how
    rows of single clients are combined; None: they already are.

    `uploads`: how rows of single clients are combined; None: they already are."""
    if trained.up is None:
        return server, centres
    up = trained.up
    if uploads is not None and experiment.by_client and not trained.secure:
        up, centres = uploads.together(up, cohort, round, centres or {})
    ids = torch.tensor(cohort, device=experiment.torch_device())
    return experiment.method.aggregate(server, up, ids), centres


def _parts(clock: dict[str, float], seconds: float) -> dict[str, float]:
    """Where the seconds of a round went; the rest is states, messages, snapshots and waiting."""
    asked = ["theory"] if "theory" in clock else []
    known = {name: clock.get(name, 0.0) for name in ("train", "upload", "aggregate", "evaluate", *asked)}
    return known | {"rest": max(0.0, seconds - sum(known.values()))}


def _mean_loss(trained: Trained) -> float | None:
    total, samples = (float(part.sum()) for part in (trained.loss.total, trained.loss.weight))
    return total / samples if samples > 0 else None


def _totals(old: dict[str, Any], line: dict[str, Any], cohort: Sequence[int]) -> dict[str, Any]:
    taken = dict(old["participations"])
    for number in cohort:
        taken[str(number)] = taken.get(str(number), 0) + 1
    sums = {key: old[key] + line[key] for key in ("params_up", "bytes_up", "bytes_down", "seconds")}
    return {**sums, "participations": taken, "finished": False}


def _ask(watch: Watch, stop: threading.Event) -> Callable[[], None]:
    """Handle Ctrl-C: the first one ends the run after its round, whose work is kept; the second ends it at once."""

    def ask() -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        watch.note("stopping after this round; Ctrl-C again stops at once")

    return ask


@contextlib.contextmanager
def _disk(folder: RunFolder) -> Iterator[None]:
    """Report a full disk in one line. The last checkpoint is whole, because files are replaced and never changed."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(
            f"no space is left for {folder.path}. Nothing that was saved is lost: "
            f"free some space, and go on: run with {option('resume', True)}, or the same sweep again."
        ) from None
