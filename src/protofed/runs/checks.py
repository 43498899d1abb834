"""What a method, a robust rule and the data require of each other, checked before a run begins."""

from collections.abc import Sequence

import torch

from protofed.config.experiment import Experiment
from protofed.data.batches import Federation
from protofed.data.domain import Domain
from protofed.engines.reference import ReferenceEngine
from protofed.engines.resources import free
from protofed.errors import UserError
from protofed.ops.trees import under

LOOKED_AT = 100  # models at most, where not every client is looked at before a run
LISTED = 2500  # bytes that lists of one client's samples take, roughly
LISTS = 2 * 10**9  # bytes of such lists at most


def check_phases(experiment: Experiment, engine: ReferenceEngine) -> None:
    """Check that every model has what the method trains."""
    method = experiment.method
    for spec in engine.specs():
        names = method.init_client(spec).params
        for prefix in {p for phase in (*method.phases(), *method.last_phases()) for p in phase.trains}:
            if not under(names, prefix):
                has = ", ".join(sorted({name.split(".")[0] for name in names}))
                raise UserError(
                    f"method.name = {experiment.method_name!r} trains {prefix}*, but {spec.architecture} has {has}. "
                    "Use another model or method"
                    + (", or project = 64 behind a frozen encoder." if prefix == "body." else ".")
                )


def method_remarks(experiment: Experiment, engine: ReferenceEngine) -> tuple[str, ...]:
    """What a user should be told about the method before a run begins."""
    method, name = experiment.method, experiment.method_name
    notes = tuple(method.remarks(engine.specs()[0], engine.federation.total))
    if experiment.rounds > 1 and experiment.participation == 1 and not method.phases():
        notes += (f"{name} trains nothing, and all clients take part in the first round: rounds = 1 is enough",)
    return notes


def check_computed(experiment: Experiment, domains: Sequence[Domain]) -> None:
    """Refuse, for computed data, what needs a list of every client's samples."""
    if domains[0].computed is None:
        return
    asked = {
        "held_out_clients": experiment.held_out_clients,
        "data.imbalance": experiment.data.imbalance > 1 and experiment.data.imbalance,
        "data.train_samples": experiment.data.train_samples,
        "data.test_samples": experiment.data.test_samples,
        "skew": experiment.skew.on and "on",
        "incremental.tasks": experiment.incremental.tasks,
        "attack.kind": experiment.attack.on and experiment.attack.kind,
        "privacy.unit": experiment.privacy.noisy and experiment.privacy.unit == "sample" and "sample",
    }
    for key, value in asked.items():
        if value:
            raise UserError(
                f"{key} = {value!r} needs lists of the clients' samples, but {domains[0].name} computes each client's "
                "when it is drawn. Leave it out, or use other data."
            )
    if len(experiment.model) > LOOKED_AT:
        raise UserError(
            f"model.name lists {len(experiment.model)} models. With computed data, list {LOOKED_AT} at most."
        )


def check_growing(experiment: Experiment) -> None:
    """Refuse methods whose clients send something once, if classes appear later."""
    from protofed.methods.oneshot import OneShot  # few experiments have one

    if isinstance(experiment.method, OneShot):
        raise UserError(
            f"clients send {experiment.method_name} their sums once, and with [incremental] they have other classes "
            "later. Use a method that trains in rounds, such as fednh, or leave [incremental] out."
        )


def check_lists(experiment: Experiment, domains: Sequence[Domain]) -> None:
    """Raise if lists of every client's samples would fill the memory."""
    needed, room = experiment.clients * LISTED, min(LISTS, free(torch.device("cpu")))
    if domains[0].computed is None and needed > room:
        raise UserError(
            f"clients = {experiment.clients}: lists of every client's samples of {domains[0].name} take some "
            f"{LISTED / 1000:.1f} kB each, {needed / 1e6:,.0f} MB in all, but only {room / 1e6:,.0f} MB are for them. "
            f"Use at most {room // LISTED} clients, or data that is computed when a client is drawn: "
            "data.name = 'gaussians', or your own (protofed.data.computed.PerClient)."
        )


def check_tests(experiment: Experiment, federation: Federation, engine: ReferenceEngine) -> None:
    """Refuse to measure the global model if there is nothing to measure it on."""
    server = experiment.method.init_server(engine.specs()[0])
    tests = sum(len(federation.global_test(domain).y) for domain in range(len(federation.shapes)))
    if experiment.evaluate.gm and not tests and experiment.method.global_client(server) is not None:
        raise UserError(
            f"evaluate.gm = {experiment.evaluate.gm} measures the global model of {experiment.method_name} on the test "
            f"part of {experiment.data.name!r}, which is empty. Use evaluate.gm = 0, or data with a test part."
        )
