"""The round loop: broadcast, train, merge, aggregate, measure, and keep what is needed to go on."""

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from protofed.checkpoints import CHECKPOINT_SECONDS, Checkpoints
from protofed.compiling import choose
from protofed.data.scaling import inputs
from protofed.data.split import Split
from protofed.engines import Engine, Trained
from protofed.environment import changed_code, environment
from protofed.errors import UserError
from protofed.experiment import Experiment
from protofed.folder import RunFolder, State
from protofed.interrupt import on_interrupt
from protofed.prepare import Prepared, draw_cohort, prepare, threads
from protofed.record import Recorder, classes
from protofed.results import Result, Watch, finish, refuse_nan, round_numbers
from protofed.theory.entry import measure, why_not


class Interrupted(Exception):
    """The run was stopped by the user; everything up to the last whole round is saved."""


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
) -> Result:
    """Run an experiment into a folder, or go on with one that was stopped.

    `prepared` is what `prepare` gave for this experiment, where data or modules are handed in; None: done here.

    `client_bytes` is how much memory client states may take, beside those of one round; None: a part of what is free.
    `cores` is how many there are for it where engine.threads leaves that open; None: all.
    """
    watch = watch or Watch()
    folder = RunFolder(Path(out))
    folder.check(experiment, resume)
    if folder.finished:
        return Result(folder.path, folder.summary())
    if prepared is None:
        where = Path(data_dir) if data_dir is not None else None
        prepared = prepare(experiment, where, cores=cores, tell=watch.note)
    return carry_out(experiment, folder, prepared, watch, threading.Event(), checkpoint_seconds, client_bytes)


def carry_out(
    experiment: Experiment,
    folder: RunFolder,
    prepared: Prepared,
    watch: Watch,
    stop: threading.Event,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    client_bytes: int | None = None,
) -> Result:
    """All that is left of a run whose clients are ready, in this process or elsewhere; `stop` ends it after a round."""
    told = watch.note
    with _disk(folder), threads(experiment, prepared.engine, told), folder.locked(), on_interrupt(_ask(watch, stop)):
        state = _open(folder, experiment, prepared, watch, client_bytes)
        choose(experiment, prepared.engine, state.server, folder, watch.note)
        recorder = Recorder(folder, experiment, prepared.engine, state.round, watch.note)
        watch.opened(folder.path)
        watch.start(experiment, state.round)
        try:
            state = _rounds(folder, experiment, prepared.engine, state, recorder, watch, stop, checkpoint_seconds)
            result = finish(
                folder, experiment, prepared.domains, prepared.split, prepared.engine, state, watch, stop,
                prepared.modules,
            )  # fmt: skip
            if not experiment.record.models:
                folder.drop_checkpoints()
            return result
        except KeyboardInterrupt:  # all rounds are saved, only the end is missing
            raise Interrupted("stopped while measuring every client") from None
        finally:
            state.clients.close()
            watch.end()


def _open(
    folder: RunFolder, experiment: Experiment, prepared: Prepared, watch: Watch, client_bytes: int | None
) -> State:
    """Set up a new folder, or find where an old one stopped."""
    started = folder.exists
    if not started:
        folder.write("experiment.toml", experiment.to_toml())
    if prepared.data_here:
        _keep_partition(folder, experiment, prepared, started)
    for name in changed_code(folder, experiment):
        watch.note(f"the file of {name} has changed since the run was begun: its rounds are not all of one code")
    folder.write_json("environment.json", environment(experiment))
    folder.write_json("classes.json", classes(prepared.domains))
    for note in (*prepared.split.notes, *prepared.notes):
        watch.note(note)
    here = experiment.torch_device()
    state, remarks = folder.restore(here, client_bytes)
    folder.go_back(state)
    for remark in remarks:
        watch.note(remark)
    if started:
        watch.note(f"resuming {folder.path} after round {state.round if state else 0}")
    done = state.round if state else 0
    if len(folder.cut(done)) < done:
        watch.note(f"rounds.jsonl lacks some of the {done} rounds done; the curve will have gaps")
    if state is None:
        server = experiment.method.init_server(prepared.engine.specs()[0])
        state = State(0, server, folder.store(here, client_bytes), _no_totals())
        folder.save(state)  # so that there is always something to fall back to
    return state._replace(server=tree_map(lambda tensor: tensor.to(here), state.server))


def _keep_partition(folder: RunFolder, experiment: Experiment, prepared: Prepared, started: bool) -> None:
    """Who has what, which must not change in a run."""
    saved = folder.file("partition.npz")
    if started and saved.is_file():
        before = Split.load(saved)
        if (before.hash, before.fingerprint) != (prepared.split.hash, prepared.split.fingerprint):
            raise UserError(
                f"{folder.path} was started with other data: it no longer gives the partition in {saved}. "
                "Restore the data, or start anew with another --out."
            )
    prepared.split.save(saved, prepared.domains)
    from protofed.report import bubbles  # with Matplotlib, which takes its time

    bubbles.draw_split(prepared.split, prepared.domains, folder.file("partition.png"))
    folder.write_json("inputs.json", inputs(prepared.domains, experiment.data.normalize))


def _no_totals() -> dict[str, Any]:
    return {"params_up": 0, "bytes_up": 0, "bytes_down": 0, "seconds": 0.0, "participations": {}, "finished": False}


def _rounds(
    folder: RunFolder,
    experiment: Experiment,
    engine: Engine,
    state: State,
    recorder: Recorder,
    watch: Watch,
    stop: threading.Event,
    checkpoint_seconds: float,
) -> State:
    """Every round that is left."""
    method = experiment.method
    checkpoints = Checkpoints(folder, experiment, state.round, watch, checkpoint_seconds)
    engine.clients = state.clients
    engine.clock.take()  # what was tried before the first round does not count
    try:
        for round in range(state.round, experiment.rounds):
            started = time.perf_counter()
            state.clients.begin(round + 1)
            cohort = draw_cohort(experiment, round)
            state.clients.fetch(cohort)
            trained = engine.train(method, state.server, cohort, round)
            cohort = cohort if trained.answered is None else list(trained.answered)
            for note in engine.notes:
                watch.note(note)
            engine.notes.clear()
            refuse_nan(folder, state, trained, cohort, f"in round {round + 1}")
            with engine.clock.part("aggregate"):
                server = combine(experiment, state.server, trained, cohort)
            train_seconds = time.perf_counter() - started

            theory = theory_numbers(experiment, engine, (state.server, server), cohort, round, trained)
            engine.clients.update(trained.clients)
            with engine.clock.part("evaluate"):
                numbers = round_numbers(experiment, engine, server, cohort, round + 1)
            numbers |= recorder.round(state.server, server, round + 1)
            parts = engine.clock.take()
            seconds = time.perf_counter() - started
            line: dict[str, Any] = {
                "round": round + 1,
                "clients": len(cohort),
                "lr": experiment.optimizer.rate(round),
                "loss": _mean_loss(trained),
                **numbers,
                **theory,
                "params_up": trained.sent.params,
                "bytes_up": trained.sent.bytes,
                "bytes_down": trained.received.bytes,
                "bytes_up_by": trained.sent.kinds,
                "bytes_down_by": trained.received.kinds,
                "seconds_train": train_seconds,
                "seconds": seconds,
                "parts": _parts(parts, seconds),
            }
            after = State(round + 1, server, state.clients, _totals(state.totals, line, cohort))
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


def combine(experiment: Experiment, server: Any, trained: Trained, cohort: Sequence[int]) -> Any:
    """The server after a round; a round in which nobody had any data leaves it as it was."""
    if trained.up is None:
        return server
    return experiment.method.aggregate(server, trained.up, torch.tensor(cohort, device=experiment.torch_device()))


def _parts(clock: dict[str, float], seconds: float) -> dict[str, float]:
    """Where the seconds of a round went; the rest is states, messages, snapshots and waiting for each other."""
    asked = ["theory"] if "theory" in clock else []
    known = {name: clock.get(name, 0.0) for name in ("train", "upload", "aggregate", "evaluate", *asked)}
    return known | {"rest": max(0.0, seconds - sum(known.values()))}


def theory_numbers(
    experiment: Experiment,
    engine: Engine,
    servers: tuple[Any, Any],
    cohort: Sequence[int],
    round: int,
    trained: Trained,
) -> dict[str, Any]:
    """Whether a convergence theorem covers this round, where that is asked for; before its clients' states count."""
    every = experiment.evaluate.theory
    if not every or (round + 1) % every or why_not(experiment.method, experiment.optimizer):
        return {}
    with engine.clock.part("theory"):
        return {"theory": measure(engine, experiment.method, servers, cohort, round, trained.clients)}


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
    """For Ctrl-C: the first ends the run after its round, whose work is not lost; the second ends it at once."""

    def ask() -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        watch.note("stopping as soon as this round is whole; Ctrl-C again stops at once")

    return ask


@contextlib.contextmanager
def _disk(folder: RunFolder) -> Iterator[None]:
    """A full disk is said in one line; the last checkpoint is whole, because files are replaced and never changed."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(
            f"no space is left for {folder.path}. Nothing that was saved is lost: "
            "free some space, and go on: run with --resume, or the same sweep again."
        ) from None
