"""The results of a run: the numbers of each round, every client at the end, and the summary."""

import json
import threading
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from protofed.config.experiment import Experiment
from protofed.engines import Engine, Trained
from protofed.errors import UserError
from protofed.method import Method
from protofed.metrics import (
    Tally,
    add,
    global_numbers,
    judged_by,
    mean_accuracy,
    own_numbers,
    personal,
    personal_numbers,
    without_answers,
)
from protofed.robust.poison import TRIGGERED
from protofed.runs.cohort import taking_part
from protofed.runs.folder import RunFolder, State
from protofed.runs.forgetting import Tasks
from protofed.runs.measured_clients import honest_of, measured_at_end, say_who_is_measured, spaced, together_measured
from protofed.runs.probes import NO_PROBES, Probes
from protofed.runs.ranking import Ranking
from protofed.runs.releases import Releases
from protofed.runs.setup import Prepared, names_of_clients
from protofed.runs.watch import Watch

CONFUSED = 1000  # classes up to which it is counted who is taken for whom
ANSWERS = 2**25  # such counts that are held at once, over clients


class Result(NamedTuple):
    """A finished run."""

    folder: Path
    summary: dict[str, Any]

    def __repr__(self) -> str:
        accuracy = self.summary["accuracy_mean"]
        found = "no test data" if accuracy is None else f"accuracy {accuracy:.1%}"
        many = f"{self.summary['clients']} clients, {self.summary['rounds']} rounds"
        return f"<Result: {self.summary['method']}, {many}, {found}, in {self.folder}>"

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """Take one record per round."""
        return RunFolder(self.folder).rounds()

    @property
    def clients(self) -> list[dict[str, Any]]:
        """Take one record per client, after the last round."""
        return RunFolder(self.folder).clients()


def refuse_nan(
    experiment: Experiment,
    folder: RunFolder,
    state: State,
    trained: Trained,
    cohort: Sequence[int],
    names: Sequence[str],
    when: str,
    saved: bool = False,
) -> None:
    """End the run if a client's loss, parameters or upload are not numbers; nothing of that round is kept."""
    bad = [number for number, ok in zip(cohort, trained.finite.tolist(), strict=True) if not ok]
    if not bad:
        return
    if not saved:
        folder.save(state)
    others = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    raise UserError(
        f"the loss of {names[bad[0]]}{others} is no longer a number {when}. The state after round {state.round} is "
        f"kept in {folder.path}. {_remedy(experiment)}"
    )


def _remedy(experiment: Experiment) -> str:
    """What to do about a loss that is no longer a number."""
    if experiment.attack.uploads:
        held = f"robust.rule = {experiment.robust.rule!r} did not hold it off"
        return f"attack.kind = {experiment.attack.kind!r} is on, and {held}. Try another rule, or a weaker attack."
    return "Start again with a lower optimizer.lr or optimizer.clip, or look at that client's data."


def _due(every: int, round: int, rounds: int) -> bool:
    return round == rounds or (every > 0 and round % every == 0)


def round_numbers(
    experiment: Experiment, engine: Engine, server: Any, cohort: Sequence[int], round: int
) -> dict[str, Any]:
    """The numbers of a round, without attackers; after the last one they are taken again, over all clients."""
    method, when = experiment.method, experiment.evaluate
    numbers: dict[str, Any] = {}
    cohort = honest_of(experiment, engine, cohort)
    if not cohort:
        return numbers
    own, has_global = _due(when.own, round, experiment.rounds), method.global_client(server) is not None

    def counted(on: str, who: str = "personal") -> list[Tally]:
        return engine.evaluate(method, server, cohort, on=on, who=who)

    if own and when.validation:
        numbers["validation_mean"] = mean_accuracy(method, counted("validation"))
    if own and when.validation and has_global:
        numbers["validation_global_mean"] = mean_accuracy(method, counted("validation", "global"))
    if own:
        numbers |= own_numbers(method, counted("own"))
    if own and has_global:
        numbers["accuracy_global_mean"] = mean_accuracy(method, counted("own", "global"))
    if when.gm > 0 and _due(when.gm, round, experiment.rounds):
        numbers |= global_numbers(method, engine.global_tally(method, server))
    if when.pm > 0 and _due(when.pm, round, experiment.rounds):
        numbers |= personal_numbers(method, counted("global"), engine.counts(cohort))
    if own and experiment.attack.kind == "backdoor":
        numbers["attack_success"] = mean_accuracy(method, counted(TRIGGERED))
    return numbers


def _personal(method: Method, tally: Tally | None, counts: Tensor) -> tuple[float | None, float | None]:
    """PM(V) and PM(L) of a client, if it was measured."""
    return personal(tally[method.inference], counts) if tally else (None, None)


def finish(
    folder: RunFolder,
    experiment: Experiment,
    prepared: Prepared,
    state: State,
    watch: Watch,
    stop: threading.Event,
    probes: Probes = NO_PROBES,
    releases: Releases | None = None,
) -> Result:
    """Run the last phases, measure every client, and write the summary last of all."""
    method, engine = experiment.method, prepared.engine
    there, names = taking_part(experiment), names_of_clients(prepared)
    if experiment.incremental.on:
        prepared.reference.federation.turn(max(0, state.round - 1))  # where a run that is resumed here would be
    everyone = measured_at_end(experiment, prepared, there)
    started = engine.clock.now()
    counts: dict[int, Tensor] = {}
    honest = honest_of(experiment, engine, everyone)
    if not honest:
        raise UserError(
            f"attack.share = {experiment.attack.share} leaves no honest client to measure. Use a lower one."
        )
    good = frozenset(honest)
    chosen = {honest[i] for i in spaced(len(honest), experiment.evaluate.pm_clients)}
    own: dict[int, Tally] = {}  # personal models on own test samples
    whole: dict[int, Tally] = {}  # the global model there
    wide: dict[int, Tally] = {}  # personal models on all test samples
    fooled: dict[int, Tally] = {}  # personal models on test samples with a backdoor's trigger
    has_global = method.global_client(state.server) is not None
    totals = dict(state.totals)
    classes = engine.specs()[0].classes
    ranking = Ranking(experiment, classes, prepared.data_here)
    confused = experiment.record.enabled and classes <= CONFUSED
    kinds = (judged_by(method), method.inference) if confused else ("", "")
    said = torch.zeros(classes, classes, dtype=torch.float64) if confused else torch.zeros(0)

    many = experiment.clients - len(there) + len(everyone)  # with those that join

    def counted(numbers: Sequence[int], on: str, who: str) -> dict[int, Tally]:
        return dict(zip(numbers, engine.evaluate(method, state.server, numbers, on=on, who=who), strict=True))

    for some in together_measured(everyone, ANSWERS // classes**2 if confused else len(everyone)):
        if method.last_phases() and not totals["finished"]:
            state.clients.begin(state.round)  # nothing of this is saved before the end: a run that is stopped redoes it
            trained = engine.finish(method, state.server, some, experiment.rounds)
            refuse_nan(experiment, folder, state, trained, some, names, "after the last round", saved=True)
            engine.clients.update(trained.clients)
            totals["bytes_down"] += trained.received.bytes
        counts |= dict(zip(some, engine.counts(some), strict=True))
        tallies = engine.evaluate(method, state.server, some, on="own", who="personal", confusion=kinds[0])
        if confused:
            true = (tally for number, tally in zip(some, tallies, strict=True) if number in good)
            said += sum(tally[judged_by(method)].said.cpu() for tally in true)
        own |= dict(zip(some, without_answers(tallies), strict=True))
        if ours := [number for number in some if number in chosen]:
            wide |= counted(ours, "global", "personal")
        if has_global:
            whole |= counted(some, "own", "global")
        ranking.measure(engine, state.server, some, own, whole)
        if experiment.attack.kind == "backdoor":
            fooled |= counted(some, TRIGGERED, "personal")
        watch.measured(len(own), many)
        if stop.is_set():
            raise KeyboardInterrupt
    joined, about_joined = probes.joined(
        experiment,
        prepared.domains,
        prepared.split,
        prepared.modules,
        state.server,
        lambda done: watch.measured(len(own) + done, many),
    )
    totals["seconds"] += engine.clock.now() - started
    if experiment.record.models:
        folder.save(state._replace(totals=totals | {"finished": True}))
    trained_clients = len(totals["participations"])
    say_who_is_measured(watch, (len(there), len(honest), len(chosen)), everyone, totals["participations"])
    central = engine.global_tally(method, state.server, kinds[1])
    if confused:
        answers = {"personal": said} | ({"global": central[method.inference].said.cpu()} if central else {})
        folder.write_arrays("confusion.npz", {name: part.long().numpy() for name, part in answers.items()})
    records: list[dict[str, Any]] = []
    trains = dict(zip(everyone, engine.samples(everyone), strict=True))
    for number in everyone:
        n = counts[number]
        records.append(
            {
                "client": number,
                "architecture": engine.architectures[number],
                "domain": prepared.domains[int(prepared.split.domain[number])].name,
                "classes": [c for c in range(len(n)) if n[c] > 0],
                "train": trains[number],
                "test": int(own[number]["head"].samples.sum()),
                "rounds": state.totals["participations"].get(str(number), 0),
                "accuracy": own[number][judged_by(method)].accuracy(),
                **{f"accuracy_{kind}": tally.accuracy() for kind, tally in own[number].items()},
                "accuracy_global": whole[number][judged_by(method)].accuracy() if whole else None,
                **dict(zip(("pm_v", "pm_l"), _personal(method, wide.get(number), n), strict=True)),
                **ranking.of(number),
                "per_class": own[number][judged_by(method)].per_class(),
                **({} if number in good else {"attacker": True}),
            }
        )
    everybody = reduce(add, (own[number] for number in honest))
    lines = [*records, *({**record, "held_out": True} for record in joined)]
    folder.write("clients.jsonl", "".join(json.dumps(r, allow_nan=False) + "\n" for r in lines))
    summary = {
        "method": experiment.method_name,
        "inference": method.inference,
        "candidates": method.candidates,
        "rounds": state.round,
        "seed": experiment.seed,
        "clients": experiment.clients,
        "clients_trained": trained_clients,
        **({"clients_measured": len(everyone)} if len(everyone) < len(there) else {}),
        **own_numbers(method, [own[number] for number in honest]),
        "accuracy_global_mean": mean_accuracy(method, [whole[number] for number in honest]) if whole else None,
        **ranking.summary(honest),
        **global_numbers(method, central),
        **personal_numbers(method, list(wide.values()), torch.stack([counts[number] for number in wide])),
        "accuracy_per_class": everybody[judged_by(method)].per_class(),
        "params_up_per_round": totals["params_up"] / max(1, state.round),
        "bytes_up": totals["bytes_up"],
        "bytes_down": totals["bytes_down"],
        "seconds": totals["seconds"],
        "partition": prepared.split.hash,
        **about_joined,
        **({} if releases is None else releases.summary()),
        **({"attackers": len(everyone) - len(honest)} if experiment.attack.on else {}),
        **Tasks(experiment, prepared).summary(folder.rounds(), everybody, central),
        **({"attack_success": mean_accuracy(method, [fooled[number] for number in honest])} if fooled else {}),
    }
    probes.pictures(folder, experiment.method_name, records)
    folder.write_json("summary.json", summary)
    return Result(folder.path, summary)
