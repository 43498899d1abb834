"""Shadow runs: what the attacker learns by training clients of its own, with and without each sample in question.

Each shadow is the attacked client's last rounds again, by the same method and from the same broadcast, on samples that
the attacker has: of the samples in question each is there by the flip of a coin, and the rest are the attacker's own.
How a sample's score is spread with and without it makes a likelihood ratio (Carlini et al., S&P 2022).

For a lower bound on epsilon, the first half of the shadows says how scores are spread, and the coins of the second half
are guessed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from protofed.data.batches import Samples
from protofed.leaks.encoders import LEAST, Encoder, World, encoder_for, largest_classes
from protofed.leaks.membership import FPRS, Background, guessed_from_others, likelihood_ratios
from protofed.leaks.scores import members_auc, one_run_bound, tpr_at
from protofed.leaks.uploads import Clients
from protofed.leaks.views import View
from protofed.method import Client, Tree
from protofed.ops import random
from protofed.ops.trees import deal
from protofed.privacy import accounting
from protofed.runs.dpsgd import NoisySteps

ROUNDS = 5  # that a shadow trains at most
GUESSED = 0.1  # share of all coins that is guessed to have shown heads, and as much tails
CONFIDENCE = 0.95


class Candidates(NamedTuple):
    """One client's samples in question, and what the attacker knows besides."""

    number: int
    labels: list[int]
    x: Tensor
    y: Tensor
    member: Tensor  # (N,) the truth: whether the client trained on it
    own: Samples  # the attacker's own, of all classes that the client has


class Shadows:
    """Shadow runs of some clients of a run."""

    def __init__(
        self, world: World, view: View, clients: Clients, many: int, classes: int, seed: int, whose: Any
    ) -> None:
        self.world, self.view, self.clients, self.many, self.classes = world, view, clients, many, classes
        self.seed, self.whose, self.engine = seed, whose, view.engine
        self.rounds = 1 if view.steps.many else min(ROUNDS, world.saved.state.round)

    def told(self, chosen: list[int], tell: Callable[[str], None]) -> dict[str, Any] | None:
        """What they say of members; None where there are too few samples to ask about."""
        scores, truth, coins, guesses = [], [], [], []
        for number in chosen:
            if (question := self._question(number)) is None:
                continue
            tell(f"client {number}: {self.many} shadow runs, which ask for {len(question.y)} samples")
            known, flips = self._played(question)
            encoder = encoder_for(self.world.saved, self.world.prepared, self.clients, number, self.whose)
            counts = torch.bincount(self.world.data.train(number).y, minlength=self.world.data.classes)
            goal = self._scores(encoder, self.view, question, counts)
            scores.append(likelihood_ratios(known, flips, goal))
            truth.append(question.member.cpu())
            ratios, heads = guessed_from_others(known, flips)
            guesses.append(ratios)
            coins.append(heads)
        if not scores:
            return None
        found, member = torch.cat(scores), torch.cat(truth)
        rates = {f"tpr_at_{fpr:g}": tpr_at(found[member], found[~member], fpr) for fpr in FPRS}
        return {
            "runs": self.many,
            "rounds": self.rounds,
            "members": int(member.sum()),
            "others": int((~member).sum()),
            "auc": members_auc(found[member], found[~member]),
            **rates,
            "epsilon": self._epsilon(torch.cat(guesses), torch.cat(coins)),
        }

    def _question(self, number: int) -> Candidates | None:
        """As many members as others of each of the client's largest classes; the rest is the attacker's own."""
        train, test = self.world.data.train(number), self.world.test_of(self.world.data, number)
        counts = self.world.data.counts[number].long().tolist()
        parts: list[tuple[Samples, bool]] = []
        own, labels = [], []
        for label in (label for label, count in enumerate(counts) if count):
            mine, others = self.world.held_out(number, label, self.seed)
            own.append(mine)
            if label not in largest_classes(counts, self.classes) or len(mine) + len(others) < LEAST:
                continue
            labels.append(label)
            rows = self.world.rows_of(number, label)
            many = min(len(rows), len(others))
            order = random.permutation(random.key(self.seed, "leaks", "asked", number, label), len(rows))
            some = rows[order[:many].to(rows.device)]
            parts.append((Samples(train.x[some], train.y[some]), True))
            parts.append((Samples(test.x[others[:many]], test.y[others[:many]]), False))
        if not parts:
            return None
        x, y = torch.cat([part.x for part, _ in parts]), torch.cat([part.y for part, _ in parts])
        member = torch.cat([torch.full((len(part.y),), inside) for part, inside in parts])
        rows = torch.cat(own)
        return Candidates(number, labels, x, y, member, Samples(test.x[rows], test.y[rows]))

    def _played(self, question: Candidates) -> tuple[Tensor, Tensor]:
        """The scores (S, N) of the samples in question in every shadow, and in which of them each was (S, N)."""
        known, flips = [], []
        for place in range(self.many):
            key = random.key(self.seed, "leaks", "shadow", question.number, place)
            heads = ~random.at_least(key, len(question.y), 0.5)
            samples = self._samples(question, heads.to(question.y.device), key)
            counts = torch.bincount(samples.y, minlength=self.world.data.classes)
            with self.engine.federation.lent(question.number, samples):
                client, up = self._trained(question.number, place)
                words = ("leaks", "shadow noise", self.seed, question.number, place)
                view = self.view.with_other(question.number, client, up, random.seed(self.seed, *words))
                frozen = encoder_for(
                    self.world.saved, self.world.prepared, self.clients, question.number, "own"
                )._replace(client=client)
                known.append(self._scores(frozen, view, question, counts))
            flips.append(heads.cpu())
        return torch.stack(known), torch.stack(flips)

    def _samples(self, question: Candidates, heads: Tensor, key: Tensor) -> Samples:
        """What one shadow trains on: of classes that nothing is asked about as many of the attacker's own samples as
        the client has, some more than once."""
        counts = self.world.data.counts[question.number].long().tolist()
        rows = []
        for label in (n for n, count in enumerate(counts) if count and n not in question.labels):
            mine = (question.own.y == label).nonzero().flatten()
            if len(mine):
                drawn = random.uniform(random.fold(key, label), counts[label]).to(mine.device) * len(mine)
                rows.append(mine[drawn.long().clamp(max=len(mine) - 1)])
        parts = [(question.x[heads], question.y[heads])]
        parts += [(question.own.x[some], question.own.y[some]) for some in rows]
        x, y = (torch.cat(part) for part in zip(*parts, strict=True))
        single = len(y) % self.engine.federation.batch_size == 1 and not self.view.privacy.noisy  # BatchNorm needs two
        short = 1 if single or not len(y) else 0
        return Samples(torch.cat([x, question.own.x[:short]]), torch.cat([y, question.own.y[:short]]))

    def _trained(self, number: int, place: int) -> tuple[Client, Tree]:
        """A client's last rounds on the samples that it was lent, from its first model, and its upload."""
        engine, method = self.engine, self.world.saved.experiment.method
        ids = torch.tensor([number], device=engine.federation.device)
        down = deal(method.broadcast(self.clients.server, ids), 0)
        kept, before = engine.clients, engine.stand_in
        try:
            engine.clients = {}
            if self.view.steps.many:
                name = f"shadow {self.seed} {place}"
                engine.stand_in = NoisySteps(self.world.saved.experiment, self.view.steps.noise, name).update
            for round in range(self.rounds):
                update = engine.update(method, number, down, round)
                engine.clients[number] = update.client
        finally:
            engine.clients, engine.stand_in = kept, before
        return tree_map(torch.Tensor.detach, update.client), update.up

    @torch.no_grad()
    def _scores(self, encoder: Encoder, view: View, question: Candidates, counts: Tensor) -> Tensor:
        """How much each sample in question (N,) looks like a member, by the upload as the server sees it."""
        sent = view.prototypes(question.number)
        counted = view.singly and not view.privacy.noisy
        found = torch.zeros(len(question.y), dtype=torch.float64)
        for label in question.labels:
            asked, mine = (question.y == label).cpu(), question.own.y == label
            known = Background.of_embeddings(self._cut(encoder.embed(question.own.x[mine])))
            prototypes = sent.of_class(label).to(known.z)
            if len(prototypes):
                z = self._cut(encoder.embed(question.x[asked.to(question.x.device)]))
                size = float(counts[label]) if counted else None
                found[asked] = known.scores(z, prototypes, size)["likelihood"].double().cpu()
        return found

    def _cut(self, z: Tensor) -> Tensor:
        """Embeddings (N, D) no longer than they are in what is released, if single samples are cut there."""
        layout = self.view.layout
        if layout is None or self.view.privacy.unit != "sample":
            return z
        shorter: Tensor = (layout.bounds[0] / z.norm(dim=1, keepdim=True).clamp(min=1e-12)).clamp(max=1)
        return z * shorter

    def _epsilon(self, guesses: Tensor, coins: Tensor) -> dict[str, Any] | None:
        """The epsilon that these guesses prove of one round, where samples are what it hides."""
        privacy = self.view.privacy
        if not privacy.noisy or privacy.unit != "sample" or self.many < 3:
            return None
        each = int(GUESSED * len(guesses))
        order = guesses.argsort()
        right = int((~coins[order[:each]]).sum() + coins[order[len(order) - each :]].sum())
        return {
            "claimed": accounting.spent(self.view.noise, 1, privacy.delta, self.view.steps),
            "lower_bound": one_run_bound(right, 2 * each, len(guesses), privacy.delta, CONFIDENCE),
            "guesses": 2 * each,
            "right": right,
            "confidence": CONFIDENCE,
        }
