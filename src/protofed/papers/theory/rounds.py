"""The `theory` entry of a round: some of its clients are measured, and the theorem is applied to the worst of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from protofed.engines import Engine
from protofed.engines.base import OnReference
from protofed.engines.reference import ReferenceEngine
from protofed.method import Client, Method, Phase, Tree
from protofed.ops.optim import Optimizer
from protofed.ops.trees import deal
from protofed.papers.theory.bounds import LossBounds, Range
from protofed.papers.theory.measure import STEPS, ClientRound, RoundMeasurement, effective, share
from protofed.papers.theory.theorems import Theorem, theorem_of

CLIENTS = 3  # of a round that are measured

Tell = Callable[[int, int], None]


def why_not(method: Method, optimizer: Optimizer) -> str | None:
    """Why there is no theorem for this training, in words."""
    if theorem_of(method) is None:
        return f"there is a convergence theorem for fedproto and fednh, not for {type(method).__name__}"
    if optimizer.name != "sgd":
        return f"the theorems are about sgd, not optimizer.name = {optimizer.name!r}"
    return None


def measure_round(
    engine: Engine,
    method: Method,
    servers: tuple[Tree, Tree],  # before and after the round
    cohort: Sequence[int],
    round: int,
    ended: Mapping[int, Client],
    tell: Tell = lambda done, of: None,
) -> dict[str, Any] | None:
    """The `theory` entry of a round, counted from 0; `ended`: its clients after training. None: nobody had data."""
    reference = engine.reference if isinstance(engine, OnReference) else engine
    theorem = theorem_of(method)
    assert isinstance(reference, ReferenceEngine)
    assert theorem is not None
    numbers = measured_clients(reference, [number for number in cohort if number in ended])
    ids = torch.tensor(list(cohort), device=reference.federation.device)
    downs = [method.broadcast(server, ids) for server in servers]
    found = []
    for done, number in enumerate(numbers):
        row = list(cohort).index(number)
        one = ClientRound(reference, method, theorem, number, round, deal(downs[0], row))
        found.append(one.measured(ended[number], deal(downs[1], row)))
        tell(done + 1, len(numbers))
    if not found:
        return None
    uncovered = _uncovered(reference, numbers, cohort) + theorem.uncovered(*servers)
    words = _estimated(reference, method.phases()[0], found, numbers, cohort)
    words += [f"the theorem does not cover {', '.join(uncovered)}"] if uncovered else []
    entry = {
        "which": theorem.which,
        "assumptions": "; ".join(words),
        "clients": numbers,
        "steps": [one.constants.steps for one in found],
        **_numbers(reference, method, theorem, found, round),
    }
    return {key: _number(value) for key, value in entry.items()}


def measured_clients(engine: ReferenceEngine, cohort: Sequence[int]) -> list[int]:
    """The clients to measure, evenly spaced among those that have data."""
    able = [number for number in cohort if engine.federation.used(number)]
    many = min(CLIENTS, len(able))
    return [able[i * len(able) // many] for i in range(many)]


def _numbers(
    engine: ReferenceEngine, method: Method, theorem: Theorem, found: Sequence[RoundMeasurement], round: int
) -> dict[str, Any]:
    """The worst value of every constant over the clients, and the consequences for the client with the tightest
    bounds."""
    phase = method.phases()[0]
    rate = engine.optimizer.rate(round) if phase.lr is None else phase.lr
    step = effective(engine.optimizer, phase, round)
    worst = {name: max(getattr(one.constants, name) for one in found) for name in ("L1", "L2", "G", "sigma2")}
    exchange = {name: max(one.exchange[name] for one in found) for name in found[0].exchange}
    each = [replace(one.constants, **worst) for one in found]
    verdicts = [theorem.verdict(method, constants, step, exchange) for constants in each]
    least = min(each, key=lambda constants: constants.grad_sq)
    verdict = _worst(verdicts)
    part = share(engine.optimizer, phase)
    chosen = {"lam": None, "rho": None} | theorem.chosen(method)
    finite = math.isfinite(sum(worst.values()) + sum(exchange.values()) + least.grad_sq)
    concluded = {
        "lr_max": _times(verdict.step_max, part),
        "lr_min": _times(verdict.step_min, part),
        "lr_max_alone": _times(least.alone, part),
        "lam_max": verdict.lam_max,
        "rho_min": verdict.rho_min,
        "lr_margin": _times(verdict.step_max, 1 / step),
        "lam_margin": _times(verdict.lam_max, 1 / chosen["lam"]) if chosen["lam"] else None,
        "grad_sq_floor": verdict.floor,
        "change_max": verdict.change,
        "holds": all(one.change < 0 for one in verdicts),
    }
    return {
        **worst,
        "grad_sq": least.grad_sq,
        **exchange,
        "lr": rate,
        **chosen,
        "change": max(one.change for one in found),
        **(concluded if finite else dict.fromkeys(concluded)),
        "suggests": as_lr(theorem.suggests([(c, exchange) for c in each]), part) if finite else {},
    }


def _worst(verdicts: Sequence[LossBounds]) -> LossBounds:
    """Values that satisfy all of them; there is no smallest step if no step does."""
    step_max = min((v.step_max for v in verdicts if v.step_max is not None), default=None)
    return LossBounds(
        step_max=step_max,
        step_min=max((v.step_min for v in verdicts if v.step_min is not None), default=None) if step_max else None,
        change=max(v.change for v in verdicts),
        floor=None if any(v.floor is None for v in verdicts) else max(v.floor or 0.0 for v in verdicts),
        lam_max=min((v.lam_max for v in verdicts if v.lam_max is not None), default=None),
        rho_min=max((v.rho_min for v in verdicts if v.rho_min is not None), default=None),
    )


def _estimated(
    engine: ReferenceEngine,
    phase: Phase,
    found: Sequence[RoundMeasurement],
    numbers: Sequence[int],
    cohort: Sequence[int],
) -> list[str]:
    """How the numbers were obtained."""
    momentum = 0.0 if phase.plain else engine.optimizer.momentum
    part = any(one.samples < engine.federation.used(number) for one, number in zip(found, numbers, strict=True))
    cut = any(one.repeated < one.constants.steps for one in found)
    unknown = any(one.constants.sigma2 == math.inf for one in found)
    says = [f"estimated from below on {len(numbers)} of {len(cohort)} clients"]
    says += [f"on {max(one.samples for one in found)} samples of each at most"] if part else []
    says += [f"in their first {STEPS} steps"] if cut else []
    says += ["sigma2 unknown, because memory holds one of their batches"] if unknown else []
    says += [f"momentum {momentum:g} counted as lr / {1 - momentum:g}"] if momentum else []
    return says


def _uncovered(engine: ReferenceEngine, numbers: Sequence[int], cohort: Sequence[int]) -> list[str]:
    """Parts of a client's training that neither theorem covers."""
    models = [engine.model(number) for number in numbers]
    found = {
        "clipped gradients": engine.optimizer.clip > 0,
        "clients that sit out": len(cohort) < engine.federation.clients,
        "dropout": any(model.dropouts for model in models),
        "BatchNorm": any(model.normalises_batches for model in models),
    }
    return [name for name, there in found.items() if there]


def as_lr(range: Range, share: float) -> Range:
    """The same values, with the step in the unit of lr."""
    return {key: (low * share, high * share) if key == "lr" else (low, high) for key, (low, high) in range.items()}


def _times(number: float | None, factor: float) -> float | None:
    return None if number is None else number * factor


def _number(value: Any) -> Any:
    """None in place of anything that is not a number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
