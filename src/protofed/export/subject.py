"""Which model is exported: a client's of a run, the global one, or a newcomer's."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from protofed.data.batches import Federation, Samples, joined
from protofed.data.names import class_names
from protofed.data.scaling import describe_inputs
from protofed.errors import UserError, option
from protofed.export.graph import Subject
from protofed.joining.join import Joining
from protofed.joining.newcomer import CHOOSE, fine_tune, pulled, welcome
from protofed.models.adapted import Adapted
from protofed.models.own import plain
from protofed.ops.trees import deal
from protofed.runs import saved as runs
from protofed.runs.cohort import held_out, taking_part
from protofed.runs.setup import Prepared, prepare

GLOBAL_CLIENTS = 50  # whose samples a global model's threshold is fitted to, at most


def of_run(
    run: str | Path,
    who: int | str,
    data_dir: Path | None = None,
    *,
    trust: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[Subject, list[str]]:
    """A client by its number, or the "global" model, from a run's last checkpoint; and what the user should be told."""
    found = runs.read_checkpoint(run, trust, tell)
    _check_client(found, who)
    return of_prepared(found, prepare(found.experiment, data_dir), who)


def of_prepared(found: runs.Saved, prepared: Prepared, who: int | str) -> tuple[Subject, list[str]]:
    """The same for a run whose data and models are at hand."""
    plan, server, notes = found.experiment, found.state.server, list(found.notes)
    _check_client(found, who)
    engine = prepared.reference
    engine.clients = found.state.clients
    method, number = plan.method, 0 if who == "global" else int(who)
    client = method.global_client(server) if who == "global" else engine.client(method, number)
    if client is None:
        raise UserError(
            f"{option('client', 'global')}: {plan.method_name} has no global model. Give the number of a client."
        )
    if who != "global" and number not in engine.clients:
        notes.append(f"client {number} never took part: its model has its initial weights")
    prototypes = method.prototypes_of(client, server)
    if prototypes is not None and not bool((prototypes.weight > 0).any()):
        prototypes = None  # there is none yet
    if prototypes is None:
        notes.append(f"{plan.method_name} has no prototypes: by head only, and nothing is ever unknown")
    whole, encoder, state = prepared.module(number), None, None
    data = engine.federation
    if isinstance(whole, Adapted):
        state = prepared.personal(number, client).state_dict()
    if isinstance(whole, Adapted) and whole.frozen:
        encoder, data = whole.encoder(), plan.federation(prepared.domains, prepared.split)
    there = taking_part(plan) if prepared.domains[0].computed is None else data.examples
    members = _members(data, there) if who == "global" else [number]
    data.hold(members)
    known, known_from = _known(data, members)
    domain = prepared.domains[data.domain(number)]
    subject = Subject(
        method=method,
        model=engine.model(number),
        client=client,
        down=deal(method.broadcast(server, torch.tensor([number])), 0),
        prototypes=prototypes,
        inputs=describe_inputs(domain, plan.normalize),
        class_names=class_names(domain.name, domain.class_names),
        own=(data.class_counts(members) > 0).any(0),
        known=known,
        known_from=known_from,
        test=joined([data.test(i) for i in members]),
        about=_about(str(found.folder.path), plan.method_name, found.state.round, who, engine.architectures[number]),
        encoder=encoder,
        state=state,
    )
    return subject, notes


def of_newcomer(run: str | Path, done: Joining) -> Subject:
    """The model of a client that joined. The threshold for unknown samples is found by a model trained without a
    quarter of the shots."""
    server, newcomers = done.server, done.newcomers
    engine, held = newcomers.engine(), newcomers.engine(CHOOSE)
    method = pulled(newcomers.experiment.method, done.records[-1]["lam"])
    down, prototypes = welcome(method, server)
    known, judge = held.federation.test(0, "validation"), None
    if len(known.y):
        judge = fine_tune(method, held, 0, down, newcomers.experiment.join.steps)
    domain, module, client = newcomers.domains[engine.federation.domain(0)], engine.module(0), done.joined.client
    return Subject(
        method=method,
        model=engine.model(0),
        client=client,
        down=down,
        prototypes=prototypes,
        inputs=describe_inputs(
            domain, newcomers.experiment.normalize, newcomers.scales[0] if newcomers.scales else None
        ),
        class_names=class_names(domain.name, domain.class_names),
        own=engine.federation.counts[0] > 0,
        known=known if judge else engine.federation.train(0),
        known_from="held-back" if judge else "training",
        test=engine.federation.test(0),
        about=_about(str(run), done.method, done.round, "newcomer", engine.architectures[0]),
        judge=judge,
        state=plain(module, client.params, client.buffers).state_dict() if isinstance(module, Adapted) else None,
    )


def _check_client(found: runs.Saved, who: int | str) -> None:
    plan = found.experiment
    if who == "global":
        return
    if not isinstance(who, int) or not 0 <= who < plan.clients:
        raise UserError(
            f"{option('client', who)}: this run has the clients 0 to {plan.clients - 1}. Give one, or 'global'."
        )
    if who in held_out(plan):
        raise UserError(
            f"{option('client', who)} was held out of training and has no model. Let it join: "
            f"protofed join {found.folder.path} --client {who} --out DIR."
        )


def _members(data: Federation, there: Sequence[int]) -> list[int]:
    """Some clients whose inputs the global model takes."""
    fitting = [number for number in there if data.shape(number) == data.shape(0)]
    return fitting[:: max(1, len(fitting) // GLOBAL_CLIENTS)]


def _known(data: Federation, members: Sequence[int]) -> tuple[Samples, str]:
    """Samples to fit to: those held back from training, or else the training samples."""
    held = joined([data.test(number, "validation") for number in members])
    if len(held.y):
        return held, "validation"
    return joined([data.train(number) for number in members]), "training"


def _about(run: str, method: str, round: int, who: int | str, architecture: str) -> dict[str, Any]:
    return {"run": Path(run).name, "method": method, "round": round, "client": who, "architecture": architecture}
