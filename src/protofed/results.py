"""What a run tells: the numbers of a round, every client at the end, and the summary."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from protofed import newcomer
from protofed.data.domain import Domain
from protofed.data.split import Split
from protofed.engines import Engine, Trained
from protofed.errors import UserError
from protofed.experiment import Experiment
from protofed.folder import RunFolder, State
from protofed.method import Method
from protofed.metrics import (
    Tally,
    add,
    global_numbers,
    global_own_numbers,
    judged_by,
    own_numbers,
    personal,
    personal_numbers,
    validation_numbers,
    without_answers,
)
from protofed.models.own import Handed
from protofed.prepare import held_out, taking_part

CONFUSED = 1000  # classes up to which it is counted who is taken for whom
ANSWERS = 2**25  # such counts that are held at once, over clients


class Watch:
    """Told what happens in a run; does nothing with it."""

    def opened(self, folder: Path) -> None: ...
    def start(self, experiment: Experiment, done: int) -> None: ...
    def round(self, line: dict[str, Any]) -> None: ...
    def measured(self, done: int, clients: int) -> None: ...
    def note(self, text: str) -> None: ...
    def end(self) -> None: ...


class Watches(Watch):
    """Several watches at once."""

    def __init__(self, *watches: Watch) -> None:
        self.watches = watches

    def opened(self, folder: Path) -> None:
        for watch in self.watches:
            watch.opened(folder)

    def start(self, experiment: Experiment, done: int) -> None:
        for watch in self.watches:
            watch.start(experiment, done)

    def round(self, line: dict[str, Any]) -> None:
        for watch in self.watches:
            watch.round(line)

    def measured(self, done: int, clients: int) -> None:
        for watch in self.watches:
            watch.measured(done, clients)

    def note(self, text: str) -> None:
        for watch in self.watches:
            watch.note(text)

    def end(self) -> None:
        for watch in self.watches:
            watch.end()


class Result(NamedTuple):
    """A finished run."""

    folder: Path
    summary: dict[str, Any]

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """One record a round."""
        return RunFolder(self.folder).rounds()

    @property
    def clients(self) -> list[dict[str, Any]]:
        """One record a client, after the last round."""
        return RunFolder(self.folder).clients()


def refuse_nan(
    folder: RunFolder, state: State, trained: Trained, cohort: Sequence[int], when: str, saved: bool = False
) -> None:
    """A client whose loss, parameters or upload are no numbers ends the run; nothing of its round is kept."""
    bad = [number for number, ok in zip(cohort, trained.finite.tolist(), strict=True) if not ok]
    if not bad:
        return
    if not saved:
        folder.save(state)
    others = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    raise UserError(
        f"the loss of client {bad[0]}{others} is no longer a number {when}. The state after round {state.round} is "
        f"kept in {folder.path}. Start anew with a lower optimizer.lr or optimizer.clip, or look at that client's data."
    )


def _due(every: int, round: int, rounds: int) -> bool:
    return round == rounds or (every > 0 and round % every == 0)


def round_numbers(
    experiment: Experiment, engine: Engine, server: Any, cohort: Sequence[int], round: int
) -> dict[str, Any]:
    """The numbers of a round; after the last one they are taken again, over all clients."""
    method, when = experiment.method, experiment.evaluate
    numbers: dict[str, Any] = {}
    if when.validation and _due(when.own, round, experiment.rounds):
        for who in ("personal", "global") if method.global_client(server) is not None else ("personal",):
            tallies = engine.evaluate(method, server, cohort, on="validation", who=who)
            numbers |= validation_numbers(method, tallies, who)
    if _due(when.own, round, experiment.rounds):
        numbers |= own_numbers(method, engine.evaluate(method, server, cohort, on="own", who="personal"))
        if method.global_client(server) is not None:
            numbers |= global_own_numbers(method, engine.evaluate(method, server, cohort, on="own", who="global"))
    if when.gm > 0 and _due(when.gm, round, experiment.rounds):
        numbers |= global_numbers(method, engine.global_tally(method, server))
    if when.pm > 0 and _due(when.pm, round, experiment.rounds):
        tallies = engine.evaluate(method, server, cohort, on="global", who="personal")
        numbers |= personal_numbers(method, tallies, engine.counts(cohort))
    return numbers


def spaced(clients: int, most: int) -> set[int]:
    """As many of the clients as are wanted at most, evenly spaced; 0: all."""
    many = min(most or clients, clients)
    return {i * clients // many for i in range(many)}


def _chunks(everyone: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    """Clients that are measured together: ten, or a hundredth of very many, up to a hundred, if `most` allows."""
    size = max(1, min(100, max(10, len(everyone) // 100), most))
    return (everyone[i : i + size] for i in range(0, len(everyone), size))


def _personal(method: Method, tally: Tally | None, counts: Tensor) -> tuple[float | None, float | None]:
    """PM(V) and PM(L) of a client, where it was measured."""
    return personal(tally[method.inference], counts) if tally else (None, None)


def newcomers(
    experiment: Experiment,
    domains: Sequence[Domain],
    split: Split,
    modules: Sequence[Handed] | None,
    server: Any,
    watch: Watch,
) -> list[dict[str, Any]]:
    """The clients that were held out join."""
    numbers = held_out(experiment)
    if not numbers:
        return []
    before = experiment.clients - len(numbers)
    joined = newcomer.held_back(experiment, domains, split, numbers, modules=modules).join(
        server, lambda done, of: watch.measured(before + done, experiment.clients)
    )
    return [{"client": number, **one.record} for number, one in zip(numbers, joined, strict=True)]


def finish(
    folder: RunFolder,
    experiment: Experiment,
    domains: Sequence[Domain],
    split: Split,
    engine: Engine,
    state: State,
    watch: Watch,
    stop: threading.Event,
    modules: Sequence[Handed] | None = None,
) -> Result:
    """The last phases, then every client is measured, and the summary is written last of all."""
    method = experiment.method
    everyone = taking_part(experiment)
    started = time.perf_counter()
    counts = engine.counts(range(experiment.clients))
    chosen = {everyone[i] for i in spaced(len(everyone), experiment.evaluate.pm_clients)}
    own: dict[int, Tally] = {}  # personal models on own test samples
    whole: dict[int, Tally] = {}  # the global model there
    wide: dict[int, Tally] = {}  # personal models on all test samples
    has_global = method.global_client(state.server) is not None
    totals = dict(state.totals)
    classes = counts.shape[1]
    confused = experiment.record.enabled and classes <= CONFUSED
    kinds = (judged_by(method), method.inference) if confused else ("", "")
    said = torch.zeros(classes, classes, dtype=torch.float64) if confused else torch.zeros(0)
    for some in _chunks(everyone, ANSWERS // classes**2 if confused else len(everyone)):
        if method.last_phases() and not totals["finished"]:
            state.clients.begin(state.round)  # nothing of this is saved before the end: a run that is stopped redoes it
            trained = engine.finish(method, state.server, some, experiment.rounds)
            refuse_nan(folder, state, trained, some, "after the last round", saved=True)
            engine.clients.update(trained.clients)
            totals["bytes_down"] += trained.received.bytes
        tallies = engine.evaluate(method, state.server, some, on="own", who="personal", confusion=kinds[0])
        if confused:
            said += sum(tally[judged_by(method)].said.cpu() for tally in tallies)
        own |= dict(zip(some, without_answers(tallies), strict=True))
        ours = [number for number in some if number in chosen]
        if ours:
            tallies = engine.evaluate(method, state.server, ours, on="global", who="personal")
            wide |= dict(zip(ours, tallies, strict=True))
        if has_global:
            tallies = engine.evaluate(method, state.server, some, on="own", who="global")
            whole |= dict(zip(some, tallies, strict=True))
        watch.measured(len(own), experiment.clients)
        if stop.is_set():
            raise KeyboardInterrupt
    joined = newcomers(experiment, domains, split, modules, state.server, watch)
    totals["seconds"] += time.perf_counter() - started
    if experiment.record.models:
        folder.save(state._replace(totals=totals | {"finished": True}))
    trained_clients = len(totals["participations"])
    if trained_clients < len(everyone):
        watch.note(f"{len(everyone) - trained_clients} clients never took part and are measured as they began")
    if len(chosen) < len(everyone):
        watch.note(f"PM is over {len(chosen)} of {len(everyone)} clients, evenly spaced (evaluate.pm_clients = 0: all)")

    central = engine.global_tally(method, state.server, kinds[1])
    if confused:
        answers = {"personal": said} | ({"global": central[method.inference].said.cpu()} if central else {})
        folder.write_arrays("confusion.npz", {name: part.long().numpy() for name, part in answers.items()})
    records, trains = [], dict(zip(everyone, engine.samples(everyone), strict=True))
    for number in everyone:
        n = counts[number]
        records.append(
            {
                "client": number,
                "architecture": engine.architectures[number],
                "domain": domains[int(split.domain[number])].name,
                "classes": [c for c in range(len(n)) if n[c] > 0],
                "train": trains[number],
                "test": int(own[number]["head"].samples.sum()),
                "rounds": state.totals["participations"].get(str(number), 0),
                "accuracy": own[number][judged_by(method)].accuracy(),
                **{f"accuracy_{kind}": tally.accuracy() for kind, tally in own[number].items()},
                "accuracy_global": whole[number][judged_by(method)].accuracy() if whole else None,
                **dict(zip(("pm_v", "pm_l"), _personal(method, wide.get(number), n), strict=True)),
                "per_class": own[number][judged_by(method)].per_class(),
            }
        )
    lines = [*records, *({**record, "held_out": True} for record in joined)]
    folder.write("clients.jsonl", "".join(json.dumps(r, allow_nan=False) + "\n" for r in lines))
    summary = {
        "method": experiment.method_name,
        "inference": method.inference,
        "candidates": method.candidates,
        "rounds": experiment.rounds,
        "seed": experiment.seed,
        "clients": experiment.clients,
        "clients_trained": trained_clients,
        **own_numbers(method, list(own.values())),
        "accuracy_global_mean": global_own_numbers(method, list(whole.values()))["accuracy_global_mean"]
        if whole
        else None,
        **global_numbers(method, central),
        **personal_numbers(method, list(wide.values()), counts[list(wide)]),
        "accuracy_per_class": reduce(add, own.values())[judged_by(method)].per_class(),
        "params_up_per_round": totals["params_up"] / experiment.rounds,
        "bytes_up": totals["bytes_up"],
        "bytes_down": totals["bytes_down"],
        "seconds": totals["seconds"],
        "partition": split.hash,
        **(newcomer.summary(experiment, joined) if joined else {}),
    }
    from protofed.report import pictures  # with Matplotlib, which takes its time

    pictures.curve(folder.rounds(), experiment.method_name, folder.file("accuracy.png"))
    pictures.clients(records, experiment.method_name, folder.file("clients.png"))
    folder.write_json("summary.json", summary)
    return Result(folder.path, summary)
