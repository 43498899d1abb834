"""Local training in steps with noise (DP-SGD): a client's round in which samples reach its model in no other way."""

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.func import vmap

from protofed import local
from protofed.config.experiment import Experiment
from protofed.engines import Trained
from protofed.engines.reference import ReferenceEngine
from protofed.local import Step, Update
from protofed.method import Batch, Client, Mean, Method, Params, Phase, Tree
from protofed.models.functional import FunctionalModel
from protofed.ops import optim, random
from protofed.ops.trees import under
from protofed.privacy.release import signal_to_noise
from protofed.privacy.sgd import as_params, clipped_sum, steps_in_epoch, with_noise
from protofed.runs.noised import no_samples

AT_ONCE = 2**26  # numbers of single gradients that are in memory at once


def gradient_sum(
    method: Method,
    model: FunctionalModel,
    phase: Phase,
    client: Client,
    batch: Batch,
    down: Tree,
    key: Tensor,
    clip: float,
) -> Tensor:
    """The sum (P,) of the clipped gradients of a batch's samples, each of the loss of a batch of this one."""
    trained = under(client.params, phase.trains)
    size = sum(p.numel() for p in trained.values())

    def one(x: Tensor, y: Tensor, key: Tensor) -> Params:
        alone = Batch(x[None], y[None], torch.ones(1, device=x.device))
        return local.slopes(method, model, phase, client, alone, down, key, stacked=True).grads

    whole = torch.zeros(size, dtype=torch.float64, device=batch.y.device)
    if not len(batch.y):
        return whole
    keys = random.fold(key, torch.arange(len(batch.y), device=batch.y.device)[:, None])
    together = max(1, AT_ONCE // max(1, size))
    for x, y, some in zip(*(torch.split(part, together) for part in (batch.x, batch.y, keys)), strict=True):
        whole += clipped_sum(vmap(one)(x, y, some), clip)
    return whole


class NoisySteps:
    """Clients' rounds in a simulation, with noise and batches that follow from the seed."""

    def __init__(self, experiment: Experiment, noise: float, name: str) -> None:
        """`name`: of the experiment, so that no other one draws the same."""
        self.experiment, self.name = experiment, name
        self.rate, self.clip = experiment.privacy.sgd_rate, experiment.privacy.sgd_clip
        self.spread = noise * self.clip
        self.attempt = 0
        self._signals: list[float] = []

    @property
    def signal(self) -> float:
        """How long the sums of this round's steps were over how long their noise was, on average."""
        return statistics.fmean(self._signals) if self._signals else 0.0

    def released(self) -> None:
        """A round is over."""
        self._signals.clear()

    def once_more(self, attempt: int, train: Callable[[], Trained]) -> Trained:
        """Train a round again, with other noise and other batches."""
        self._signals.clear()
        self.attempt = attempt
        try:
            return train()
        finally:
            self.attempt = 0

    def update(self, engine: ReferenceEngine, method: Method, number: int, mine: Tree, round: int) -> Update:
        """One client's whole round; what it sends and keeps is computed without a sample."""
        model, none = engine.model(number), no_samples(engine, number)
        client = method.receive(model, engine.client(method, number), none, mine)
        each, (pace,) = steps_in_epoch(self.rate), engine.paces(round, [number])
        with engine.clock.part("train"):
            for place, phase in enumerate(method.phases()):
                words = (self.experiment.seed, "steps", self.name, round, self.attempt, number, place)
                key = random.key(*words).to(engine.federation.device)
                client, _, _ = local.train(
                    method,
                    model,
                    engine.optimizer,
                    [phase],
                    client,
                    partial(self._batches, engine, number, random.fold(key, -2)),
                    mine,
                    key,
                    engine.optimizer.rate(round),
                    engine.local_epochs,
                    engine.rounding,
                    pace,
                    each,
                    self.step,
                )
        with engine.clock.part("upload"):
            up, client = method.upload(model, client, none, mine)
        nothing = torch.zeros((), device=engine.federation.device)
        return Update(up, client, Mean(nothing, nothing))

    def _batches(self, engine: ReferenceEngine, number: int, key: Tensor, epoch: int) -> Iterator[Batch]:
        """The batches of an epoch, in which every sample is once on average."""
        key = random.fold(key, epoch)
        for step in range(steps_in_epoch(self.rate)):
            yield engine.federation.drawn(number, random.fold(key, step), self.rate)

    def step(
        self,
        method: Method,
        model: FunctionalModel,
        optimizer: optim.Optimizer,
        phase: Phase,
        client: Client,
        moments: optim.Moments,
        batch: Batch,
        down: Tree,
        key: Tensor,
        lr: float | Tensor,
    ) -> Step:
        """One step of one client: what follows from the noised sum costs nothing."""
        total = gradient_sum(method, model, phase, client, batch, down, key, self.clip)
        released = with_noise(total, self.spread, key)
        self._signals.append(signal_to_noise(released, self.spread))
        trained = under(client.params, phase.trains)
        grads = as_params(released / self.experiment.batch_size, trained)
        pull = phase.pull(client, down) if phase.pull else {}
        trained, moments = optim.update(optimizer, trained, grads, moments, lr, phase.plain, phase.clip, pull)
        return Step(client._replace(params=client.params | trained), moments, total.new_zeros(()), ())
