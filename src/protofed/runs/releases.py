"""What of each round of a run is released, with how much noise, and what that costs."""

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from protofed.config.experiment import Experiment
from protofed.engines import Trained
from protofed.engines.reference import ReferenceEngine
from protofed.engines.wire import Size, encoded_size
from protofed.errors import UserError
from protofed.method import Each, Mean, Tree
from protofed.ops import random
from protofed.privacy import Privacy, accounting
from protofed.privacy.accounting import NO_STEPS, NOTHING, PaidSteps
from protofed.privacy.ledger import LEDGER, Released, SpendingLedger, digest_of
from protofed.privacy.noise import seeded, seeded_laplace
from protofed.privacy.release import Layout, noised_sum, over_clients, signal_to_noise, with_models
from protofed.privacy.shared import honest_answers, longest, noised_grid, share_of_noise
from protofed.privacy.worth import Statistics, groups_of, largest, scale_of_choice, worths
from protofed.runs.budget import choice_of, noise_of, steps_of
from protofed.runs.cohort import draw_cohort
from protofed.runs.dpsgd import NoisySteps
from protofed.runs.noised import layout_of, vector_of_samples
from protofed.runs.securesum import KIND, cut_note

ASIDE = ("engine", "evaluate", "record", "join", "device")  # what results do not depend on
CUT = 0.01  # a clip that leaves less than this of every upload is probably a mistake
SEEDED = "seeded, because this is a simulation: who knows the seed can take the noise off again"
OUTSIDE = (
    "accuracies, counts of samples, client states and everything else in this folder but privacy.jsonl: the simulation "
    "computed them from clients' samples without noise"
)
RELATION = {
    "client": "one client with all its samples is there, or sends nothing",
    "sample": "one sample is there, or not",
}


class Noisy(NamedTuple):
    """What a round releases: a noised sum (P + R,), and where the method needs them the clients' own noised vectors."""

    total: Tensor
    spread: float  # standard deviation of the noise in the sum
    singles: list[Tensor]
    models: Sequence[Mean | Each] = ()  # that were trained in steps with noise, over all clients
    uneven: float = 1.0  # the root of the mean square of all numbers' noise, over `spread`

    @property
    def ratio(self) -> float:
        """Signal to noise."""
        return signal_to_noise(self.total, self.spread * self.uneven)


class Cut(NamedTuple):
    """One clipped vector per client, how long units' values were, and how much more noise each number gets."""

    vectors: list[Tensor]
    lengths: list[float]
    uneven: list[Tensor]


class Releases:
    """The releases of one run."""

    source, outside = SEEDED, OUTSIDE
    steps: PaidSteps = NO_STEPS
    training: NoisySteps | None = None

    def __init__(
        self, experiment: Experiment, engine: ReferenceEngine, folder: Path, rounds: int, tell: Callable[[str], None]
    ) -> None:
        """`rounds`: how many are done."""
        self.experiment, self.engine, self.tell = experiment, engine, tell
        self.privacy, self.ledger = experiment.privacy, SpendingLedger(folder / LEDGER)
        self.ledger.check(rounds)
        sums = not self.privacy.noisy_steps or layout_of(experiment, engine).size > 0
        self.noise = noise_of(experiment, sums)
        self.steps, self.choice = steps_of(experiment, sums), choice_of(experiment)
        if self.ledger.lines:
            first = self.ledger.lines[0]
            self.choice = first.choice
            self.noise, self.steps = first.noise or NOTHING, PaidSteps(first.steps, first.rate, first.step_noise)
        self.affordable = accounting.affordable(
            self.noise, self.privacy.epsilon, self.privacy.delta, self.steps, self.choice
        )
        kept = {key: part for key, part in experiment.to_dict().items() if key not in ASIDE}
        self.name = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]
        if self.steps.many:
            self.training = NoisySteps(experiment, self.steps.noise, self.name)
            engine.stand_in = self.training.update
        self.cohort = len(draw_cohort(experiment, 0))
        self.sent = self.received = Size(0, 0)
        self.clip = self._clip_after(rounds)
        self._warned = False
        self._sums: Any = None

    def _clip_after(self, rounds: int) -> float:
        """The clip with which the next round is released: where it follows the clients' lengths, the ledger says it."""
        lines = self.ledger.of_round(rounds)
        return lines[-1].next_clip if self.privacy.adaptive and lines else self.privacy.clip

    @property
    def now(self) -> Privacy:
        """The promise of this round: with the clip that it has."""
        return replace(self.privacy, clip=self.clip)

    def epsilon(self) -> float:
        """What is spent."""
        return self._spent(self.ledger.most())

    def _spent(self, times: int) -> float:
        return accounting.spent(self.noise, times, self.privacy.delta, self.steps, self.choice)

    def enough(self, cohort: Sequence[int], round: int) -> bool:
        """Whether the budget pays for a round of these clients; one that is done again may cost nothing."""
        return bool(self.ledger.of_round(round + 1)) or self.ledger.most(cohort) <= self.affordable

    def noised(
        self,
        trained: Trained,
        cohort: Sequence[int],
        round: int,
        server: Tree,
        again: Callable[[], Trained] | None = None,
    ) -> Trained | None:
        """A round's result with what may be released of it in place of the uploads; clients' losses are withheld.
        None if the budget does not pay for it. `again` trains the round once more, for steps with other noise."""
        found = self.release(trained, cohort, round, server, again)
        none = torch.zeros(len(cohort))
        if found is None:
            return None
        up, trained = found
        received, secure = trained.received + self.received, self.privacy.secure_sum
        return trained._replace(up=up, loss=Mean(none, none), sent=self.sent, received=received, secure=secure)

    def release(
        self,
        trained: Trained,
        cohort: Sequence[int],
        round: int,
        server: Tree,
        again: Callable[[], Trained] | None = None,
    ) -> tuple[Tree, Trained] | None:
        """The noised sum of a round's uploads as `aggregate` takes it, and the result it is of; None if the budget does
        not pay for it.

        If this round was released before, with the same result, it is the same release and costs nothing. With any
        other result it is another one: it gets noise of its own, in its steps as well, and is paid for.
        """
        layout = layout_of(replace(self.experiment, privacy=self.now), self.engine, server)
        cut = self._cut(layout, trained, cohort, round, 0, server)
        self._warn(layout, cut.lengths)
        before = self.ledger.of_round(round + 1)
        for attempt in range(len(before) + 1):
            if attempt and self.training is not None and again is not None:
                trained = self.training.once_more(attempt, again)
            if attempt and (self.training is not None or self.choice):
                cut = self._cut(layout, trained, cohort, round, attempt, server)
            models = [] if self.training is None else layout.models(trained.up)
            made = self._noisy(layout, cut, models, cohort, round, attempt)
            if any(not bool(torch.isfinite(one).all()) for one in (made.total, *made.singles)):
                raise UserError("[privacy]: an upload is not finite. Use a lower optimizer.lr.")
            states = [] if self.training is None else tree_leaves((trained.clients, trained.up))
            digest = digest_of(torch.cat([made.total, *made.singles]), *states)
            if attempt < len(before) and before[attempt].digest == digest:
                break
            if attempt == len(before):
                if self.ledger.most(cohort) > self.affordable:
                    return None
                self.ledger.add(self._line(layout, round + 1, attempt, cohort, digest, made))
        if self.privacy.adaptive:
            self.clip = layout.next_clip(made.total, len(cohort))
        if self.training is not None:
            self.training.released()
        total, singles, known = (tree_map(torch.Tensor.cpu, part) for part in (made.total, made.singles, made.models))
        up = layout.opened(total, len(cohort), made.spread, singles, known)
        return tree_map(lambda tensor: tensor.to(self.engine.federation.device), up), trained

    def _line(
        self, layout: Layout, round: int, attempt: int, cohort: Sequence[int], digest: str, made: Noisy
    ) -> Released:
        """The line of a release in the ledger."""
        if self.training is None:
            clips = (self.clip, layout.next_clip(made.total, len(cohort))) if self.privacy.adaptive else (0.0, 0.0)
            line = Released(round, attempt, tuple(cohort), digest, made.ratio, self.noise)
            return line._replace(clip=clips[0], next_clip=clips[1], choice=self.choice)
        steps, signal = self.steps, self.training.signal
        ratio = made.ratio if len(made.total) else signal
        noise = 0.0 if self.noise == NOTHING else self.noise
        return Released(round, attempt, tuple(cohort), digest, ratio, noise, *steps, signal)

    def _noisy(
        self,
        layout: Layout,
        cut: Cut,
        models: Sequence[Mean | Each],
        cohort: Sequence[int],
        round: int,
        attempt: int,
    ) -> Noisy:
        """These vectors with noise, and models that were trained in steps with noise; under a secure sum, only sums."""
        draw = partial(self._draw, round, attempt, cohort)
        one = encoded_size(layout.sent())
        answers = honest_answers(self.privacy, self.cohort) if self.privacy.secure_sum else 1
        made = Noisy(torch.zeros(0, dtype=torch.float64), 0.0, [])
        if layout.size:  # else there is nothing but models
            made = Noisy(*noised_sum(layout, cut.vectors, self.noise, draw, answers, cut.uneven))
        if not self.privacy.secure_sum:
            self.sent = one.times(len(cohort))
            more = torch.stack(cut.uneven).square().mean().sqrt().item() if cut.uneven else 1.0
            return made._replace(models=over_clients(models), uneven=more)
        from protofed.privacy.simulated import SimulatedSums  # needs the packages of secure sums

        self._sums = self._sums or SimulatedSums(self.privacy, self.cohort)
        noised = Mean(torch.stack(made.singles), torch.ones(len(cohort))) if layout.size else None
        rows = noised if self.training is None else with_models(noised, models)
        grid = noised_grid(self.now, self.noise, self.cohort, len(models))
        opened, traffic = self._sums.sum(rows, cohort, round, grid.caps, grid)
        if opened.cut:
            self.tell(cut_note(round + 1, opened.cut, self.privacy.range))
        self.sent = Size(traffic.up, one.params * len(cohort), {KIND: traffic.up})
        self.received = Size(traffic.down, 0, {KIND: traffic.down})
        known, total = opened.up if self.training is not None else {"noised": opened.up}, made.total
        return Noisy(known["noised"].total if layout.size else total, made.spread, [], known.get("models", ()))

    def _draw(self, round: int, attempt: int, cohort: Sequence[int], place: int, many: int) -> Tensor:
        number = cohort[place] if place >= 0 else -1
        return seeded(random.key(self.experiment.seed, "privacy", self.name, round, attempt, number), many)

    def _cut(
        self, layout: Layout, trained: Trained, cohort: Sequence[int], round: int, attempt: int, server: Tree
    ) -> Cut:
        """One vector per client, clipped."""
        if trained.up is None or not layout.size:  # nobody has a sample, or sends anything that is computed from one
            return Cut([torch.zeros(layout.size, dtype=torch.float64)] * len(cohort), [], [])
        if self.privacy.unit == "client":
            vectors, lengths = layout.vectors(trained.up)
            return Cut(list(vectors.unbind(0)), lengths.tolist(), [])
        made = Cut([], [], [])
        clients = trained.clients if self.training is not None else None
        most = longest(self.privacy) if self.privacy.secure_sum else math.inf
        for number in cohort:
            choose = partial(self._choose, layout, round, attempt, number) if self.choice else None
            found = vector_of_samples(layout, self.experiment, self.engine, number, round, server, clients, choose)
            made.vectors.append(found.vector.clamp(-most, most))
            made.lengths.extend(found.lengths)
            if found.chosen is not None:
                made.uneven.append(layout.unevenness(found.chosen))
        return made

    def _choose(self, layout: Layout, round: int, attempt: int, number: int, of: Statistics | None) -> Tensor:
        """The dimensions (D,) that one client chooses for this release: the largest scores with noise."""
        many = groups_of(self.privacy, layout.width).sizes[0]
        scale = scale_of_choice(self.privacy, many, self.choice)
        key = random.key(self.experiment.seed, "worth", self.name, round, attempt, number)
        noise = scale * seeded_laplace(key, layout.width).to(self.engine.federation.device)
        return largest(noise if of is None else worths(of, self.privacy.worth_limit) + noise, many)

    def _warn(self, layout: Layout, lengths: Sequence[float]) -> None:
        """Say once if the clip leaves next to nothing of every upload."""
        known = [length for length in lengths if length > 0]
        if self._warned or not known or layout.bounds[0] >= CUT * min(known):
            return
        self._warned = True
        low, middle, high = min(known), statistics.median(known), max(known)
        self.tell(
            f"privacy.clip = {self.clip:g} leaves less than {CUT:.0%} of every {self.privacy.unit}'s values, "
            f"which are {low:.3g} to {high:.3g} long (median {middle:.3g}). A larger clip gives the same epsilon"
        )

    def line(self, round: int) -> dict[str, Any]:
        """What the line of a round says of it."""
        last = self.ledger.of_round(round + 1)[-1]
        spent = self._spent(self.ledger.most_until(last))
        line = {"epsilon_spent": spent, "signal_to_noise": last.signal_to_noise}
        line |= {"clip": last.clip} if last.clip else {}
        return line | ({"signal_to_noise_steps": last.step_signal} if last.steps else {})

    def summary(self) -> dict[str, Any]:
        """What a summary says of the promise and of what was spent."""
        privacy, lines = self.privacy, self.ledger.lines
        shares: dict[str, Any] = {}
        if privacy.where == "sum" and self.noise != NOTHING:
            shares = {"share": share_of_noise(privacy, self.noise, self.cohort) / privacy.clip}
            shares |= {"honest_answers": honest_answers(privacy, self.cohort)}
        if self.steps.many:
            shares |= {"sgd_rate": self.steps.rate, "sgd_clip": privacy.sgd_clip, "sgd_noise": self.steps.noise}
            shares |= {"steps": self.steps.many, "steps_of_one": self.steps.many * self.ledger.most()}
            shares |= {"signal_to_noise_steps": [line.step_signal for line in lines]}
        if self.choice:
            shares |= {"worth": privacy.worth, "choice": self.choice}
        if privacy.adaptive:
            shares |= {"clip_quantile": privacy.clip_quantile, "clips": [line.clip for line in lines]}
        return {
            "epsilon_spent": self.epsilon(),
            "delta": privacy.delta,
            "privacy": {
                "unit": privacy.unit,
                "hides": RELATION[privacy.unit],
                "where": privacy.where,
                "epsilon": privacy.epsilon,
                "clip": privacy.clip,
                "noise": None if self.noise == NOTHING else self.noise,
                **shares,
                "noise_source": self.source,
                "accountant": accounting.accountant(),
                "releases": len(lines),
                "releases_of_one": self.ledger.most(),
                "signal_to_noise": [line.signal_to_noise for line in lines],
                "not_covered": self.outside,
            },
        }
