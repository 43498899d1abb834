"""What the server sees of a client's prototypes: the upload itself, a sum over clients, or either with noise."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from protofed.data.batches import Samples
from protofed.engines.reference import ReferenceEngine
from protofed.errors import UserError
from protofed.leaks.uploads import Clients, SentPrototypes, means_in, prototypes_of, sum_of, upload_again
from protofed.method import Batch, Client, LocalData, Tree
from protofed.ops import random
from protofed.ops.trees import deal, stack
from protofed.privacy import Privacy
from protofed.privacy.accounting import NO_STEPS
from protofed.privacy.ledger import LEDGER
from protofed.privacy.noise import seeded
from protofed.privacy.release import Layout, noised_sum
from protofed.privacy.shared import honest_answers
from protofed.runs.budget import noise_of, steps_of
from protofed.runs.cohort import draw_cohort
from protofed.runs.lines import read_lines
from protofed.runs.noised import layout_of
from protofed.runs.saved import Saved

AT_ONCE = 256  # samples whose single uploads are made in one go


class View:
    """The server's view of a round, and of rounds in which one client had other samples."""

    def __init__(self, saved: Saved, engine: ReferenceEngine, clients: Clients, seed: int) -> None:
        self.saved, self.engine, self.clients, self.seed = saved, engine, clients, seed
        self.privacy = saved.experiment.privacy
        self.layout: Layout | None = None
        self.noise, self.steps = 0.0, NO_STEPS
        if self.privacy.worth:
            raise UserError(
                f"protofed attack looks at noise that is the same in all dimensions, and this run has privacy.worth = "
                f"{self.privacy.worth:g}. Attack a run without it."
            )
        if self.privacy.noisy:
            self.privacy = promise_of(saved, clients.kept)
            self.layout = layout_of(replace(saved.experiment, privacy=self.privacy), engine, clients.server)
            sums = self.layout.size > 0
            self.noise, self.steps = noise_of(saved.experiment, sums), steps_of(saved.experiment, sums)
        self._draws = 0
        self._seen: dict[int, SentPrototypes] = {}
        self._own: dict[int, Tensor] = {}
        self._others: dict[int, Any] = {}

    def with_other(self, number: int, model: Client, up: Tree, seed: int) -> "View":
        """The view of a round in which this client had trained another model and sent another upload."""
        uploads, models = self.clients.uploads | {number: up}, self.clients.models | {number: model}
        made = View(self.saved, self.engine, self.clients._replace(uploads=uploads, models=models), seed)
        if self.layout is not None and not self.singly:
            others = [other for other in self.clients.numbers if other != number]
            made._own = {other: self._own_vector(self.layout, other) for other in others}
        return made

    @property
    def singly(self) -> bool:
        """Whether the server sees each client's upload by itself."""
        return self.privacy.where == "client" if self.privacy.noisy else not self.privacy.secure_sum

    @property
    def words(self) -> str:
        """What the attacker has, in words."""
        what = "each upload singly" if self.singly else "only the sum over the round's clients"
        return f"{what}, with noise" if self.privacy.noisy else what

    def prototypes(self, number: int, samples: Samples | None = None) -> SentPrototypes:
        """What the server sees; `samples`: if this client had had these alone."""
        if samples is None and number in self._seen:
            return self._seen[number]
        if self.layout is not None:
            up = self._noised(self.layout, number, samples)
        else:
            up = self._upload(number, samples)
            if not self.singly:
                up = sum_of([*self._others_of(number), up])
        found = prototypes_of(up, self.engine)
        assert found is not None
        if samples is None:
            self._seen[number] = found
        return found

    def _upload(self, number: int, samples: Samples | None) -> Tree:
        if samples is None:
            return self.clients.uploads[number]
        return upload_again(self.saved, self.engine, number, self.clients.server, samples)

    def _others_of(self, number: int) -> Sequence[Tree]:
        """The sum of all other clients' uploads, as a list of one; empty if there is no other."""
        if number not in self._others:
            rest = [self.clients.uploads[other] for other in self.clients.numbers if other != number]
            self._others[number] = [deal(sum_of(rest), 0)] if rest else []
        return self._others[number]  # type: ignore[no-any-return]

    def _noised(self, layout: Layout, number: int, samples: Samples | None) -> Tree:
        """What is released, opened as the method gets it."""
        mine = self._own_vector(layout, number) if samples is None else self.vector(layout, number, samples)
        vectors = [mine]
        if not self.singly:
            vectors += [self._own_vector(layout, other) for other in self.clients.numbers if other != number]
        self._draws += 1
        draw, answers = partial(self.draw, self._draws), 1
        if self.privacy.where == "sum":
            answers = honest_answers(self.privacy, len(draw_cohort(self.saved.experiment, 0)))
        released, spread, singles = noised_sum(layout, vectors, self.noise, draw, answers)
        return layout.opened(released.cpu(), len(vectors), spread, [one.cpu() for one in singles])

    def draw(self, number: int, place: int, many: int) -> Tensor:
        """Noise of the kind that the run drew, from keys that no run uses."""
        return seeded(random.key(self.saved.experiment.seed, "leaks", self.seed, number, place), many)

    def _own_vector(self, layout: Layout, number: int) -> Tensor:
        if number not in self._own:
            self._own[number] = self.vector(layout, number, None)
        return self._own[number]

    def vector(self, layout: Layout, number: int, samples: Samples | None) -> Tensor:
        """A client's clipped vector (P + R,), as the run releases it: of its upload, or the sum of its samples'."""
        if self.privacy.unit == "client":
            return layout.vectors(stack([self._upload(number, samples)]))[0][0]
        samples = self.engine.federation.train(number) if samples is None else samples
        parts = [
            self.sample_vectors(layout, number, Samples(*some)).sum(0)
            for some in zip(torch.split(samples.x, AT_ONCE), torch.split(samples.y, AT_ONCE), strict=True)
        ]
        return torch.stack(parts).sum(0)

    def sample_vectors(self, layout: Layout, number: int, samples: Samples) -> Tensor:
        """The clipped vectors (N, P + R) of single samples."""
        method, model, classes = self.saved.experiment.method, self.engine.model(number), self.engine.federation.classes
        client, data = self.clients.models[number], self.engine.federation.local(number, self.saved.state.round - 1)
        ids = torch.tensor([number], device=samples.y.device)
        down = deal(method.broadcast(self.clients.server, ids), 0)

        def single(x: Tensor, y: Tensor) -> Tree:
            counts = (torch.arange(classes, device=y.device) == y).to(data.counts)
            mine = LocalData([Batch(x[None], y[None], counts.new_ones(1))], counts, data.key)
            return method.upload(model, client, mine, down)[0]

        return layout.vectors(vmap(single)(*samples))[0]


def promise_of(saved: Saved, kept: bool) -> Privacy:
    """What a run promises of its last round (or of the next one, if that is not `kept`): with the clip of that round,
    where it follows the clients' lengths."""
    privacy = saved.experiment.privacy
    if not privacy.adaptive:
        return privacy
    lines = [line for line in read_lines(saved.folder.file(LEDGER)) if line["round"] == saved.state.round]
    clip = lines[-1]["clip" if kept else "next_clip"] if lines else privacy.clip
    return replace(privacy, clip=float(clip))


def holdings(view: View, clients: Clients) -> dict[str, Any]:
    """Which classes each client holds and how many samples, as far as the server's view tells."""
    truth = view.engine.counts(clients.numbers)
    held = truth > 0
    frequent = (held.double().mean(0) > 0.5).expand_as(held)  # a guess without any upload
    alone = [int(c) for c in (held.sum(0) == 1).nonzero().flatten()]
    told: dict[str, Any] = {"guess_right": float((frequent == held).double().mean()), "held_by_one": alone}
    if not view.singly:
        return told | {"classes": "not seen", "classes_right": None, "counts": "not seen", "clients": []}
    weights = torch.stack([view.prototypes(number).weight.sum(1).cpu() for number in clients.numbers])
    noisy = view.privacy.noisy
    per_class = not noisy and bool(torch.equal(weights.to(truth), truth)) and bool((truth > 1).any())
    sizes = [] if noisy else [_total(clients.uploads[number]) for number in clients.numbers]
    in_all = bool(sizes) and sizes == [float(n) for n in truth.sum(1)]
    lines = [
        {
            "client": number,
            "classes": [int(c) for c in (weights[row] > 0).nonzero().flatten()],
            "samples": [int(n) for n in weights[row]] if per_class else None,
            "samples_in_all": int(truth[row].sum()) if per_class or in_all else None,
        }
        for row, number in enumerate(clients.numbers)
    ]
    return told | {
        "classes": "seen with noise" if noisy else "seen",
        "classes_right": float(((weights > 0) == held).double().mean()),
        "counts": "seen per class" if per_class else "seen in all" if in_all else "not sent",
        "clients": lines,
    }


def _total(up: Tree) -> float:
    """The weight of a model in an upload, which may be the client's number of samples."""
    return next((float(mean.weight) for mean in means_in(up) if mean.weight.ndim == 0), 0.0)
