"""Whether a method's samples can be kept apart in training, tried before a run on samples that are made up.

Training in steps with noise (DP-SGD) promises what it does for any method, because each gradient is that of a batch of
one sample, and nothing else reads samples. It is the same method only where that is what the method does anyway.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from protofed.config.experiment import Experiment
from protofed.engines.reference import ReferenceEngine
from protofed.errors import UserError, first_line
from protofed.method import Batch, Client, Each, LocalData, Mean, Tree
from protofed.ops import random
from protofed.ops.trees import alone, is_node
from protofed.privacy.release import Layout
from protofed.runs.dpsgd import gradient_sum
from protofed.runs.noised import download, no_samples, upload_alone

LABELS = (0, 0, 1, 0)  # of the samples that are made up
SPREAD = 8.0  # of their numbers, which are far apart
NEAR = 1e-4  # as far as rounding goes
UNMAPPED = (RuntimeError, NotImplementedError, ValueError, TypeError)  # raised by torch.vmap
OTHERWISE = "Leave out privacy.sgd_rate and use a frozen encoder, or privacy.unit = 'client'"


def check_steps(experiment: Experiment, engine: ReferenceEngine, layout: Layout) -> None:
    """Refuse what cannot be trained sample by sample, or sends of samples what cannot be bounded."""
    name, method = experiment.method_name, experiment.method
    if experiment.engine.name == "ray":
        raise UserError("engine.name = 'ray' does not go with privacy.sgd_rate. Use engine.name = 'auto'.")
    if not method.phases():
        raise UserError(f"{name} trains nothing, so privacy.sgd_rate has no effect. Leave it out.")
    if method.last_phases():
        raise UserError(
            f"{name} trains once more after the last round, which privacy.sgd_rate does not cover. Use another method, "
            "or privacy.unit = 'client'."
        )
    for number in {a: n for n, a in enumerate(engine.architectures)}.values():
        _Trial(experiment, engine, number).check(layout)


class _Trial:
    """A round of one client whose samples are made up."""

    def __init__(self, experiment: Experiment, engine: ReferenceEngine, number: int) -> None:
        self.experiment, self.engine, self.number = experiment, engine, number
        self.name, self.method, self.model = experiment.method_name, experiment.method, engine.model(number)
        self.device = engine.federation.device
        self.batch, self.others = self._made_up("made up"), self._made_up("others")

    def _made_up(self, what: str) -> Batch:
        y = torch.tensor(LABELS, device=self.device) % self.engine.federation.classes
        x = self.engine.federation.blank(self.number, len(y))
        numbers = random.uniform(random.key(what), x.numel()).reshape(x.shape)
        x = (SPREAD * (numbers - 0.5)).to(x) if x.is_floating_point() else (2 * numbers).to(x)  # tokens 0 and 1
        return Batch(x.to(self.device), y, torch.ones(len(y), device=self.device))

    def check(self, layout: Layout) -> None:
        """Refuse what mixes samples, or what reads them elsewhere than in a loss or in class sums."""
        self._refuse_layers()
        method, model, number = self.method, self.model, self.number
        none, data, others = no_samples(self.engine, number), self._data(self.batch), self._data(self.others)
        first = self.engine.client(method, number)
        server = tree_map(lambda tensor: tensor.to(self.device), method.init_server(self.engine.specs()[0]))
        down = download(self.experiment, self.engine, number, server)
        up, _ = method.upload(model, method.receive(model, first, others, down), others, down)
        try:
            ids = torch.tensor([number], device=self.device)
            server = method.aggregate(server, alone(up), ids)
        except (*UNMAPPED, KeyError, IndexError) as error:
            raise UserError(
                f"{self.name} cannot be tried with privacy.sgd_rate ({first_line(error)}). {OTHERWISE}."
            ) from None
        down = download(self.experiment, self.engine, number, server)  # one that has learnt something
        client = method.receive(model, first, data, down)
        if not _same(client, method.receive(model, first, none, down), 0):
            raise UserError(
                f"{self.name} computes from a client's samples what it starts a round with, which no step with noise "
                f"covers (privacy.sgd_rate). {OTHERWISE}."
            )
        self._refuse_losses(client, down)
        self._refuse_uploads(client, server, none, data, layout)

    def _data(self, batch: Batch) -> LocalData:
        counts = torch.bincount(batch.y, minlength=self.engine.federation.classes).to(batch.mask)
        return no_samples(self.engine, self.number)._replace(batches=[batch], counts=counts)

    def _refuse_layers(self) -> None:
        """Samples of a batch may not see each other."""
        which = self.engine.architectures[self.number]
        if self.model.recurrent:
            raise UserError(
                f"{which} has recurrent layers (LSTM, GRU), whose gradients cannot be taken sample by sample "
                f"(privacy.sgd_rate). {OTHERWISE}."
            )
        x, key = self.batch.x, random.key("dropout").to(self.device)
        client = self.engine.client(self.method, self.number)
        apart = not self.model.normalises_batches
        if apart:
            other = torch.cat([x[:1], x[1:].flip(0) * 2 if x.is_floating_point() else 1 - x[1:]])
            before, after = (self.model.training(client.buffers, key, self.batch.mask) for _ in range(2))
            apart = torch.allclose(before.embed(client, x)[0], after.embed(client, other)[0], atol=NEAR, rtol=NEAR)
            apart = apart and _same(before.buffers, client.buffers, 0)
        if not apart:
            raise UserError(
                f"{which} mixes the samples of a batch in training, as BatchNorm does, so a sample has no gradient of "
                "its own (privacy.sgd_rate). Use a model with GroupNorm or without normalisation."
            )

    def _refuse_losses(self, client: Client, down: Tree) -> None:
        """A batch's loss must be the mean of its samples' losses."""
        for phase in self.method.phases():
            loss_of = phase.loss or self.method.loss

            def loss(batch: Batch, loss_of: Any = loss_of) -> tuple[Tensor, Tree]:
                found = loss_of(self.model, client, batch, down)
                return found if isinstance(found, tuple) else (found, ())

            whole, seen = loss(self.batch)
            if tree_leaves(seen):
                raise UserError(
                    f"{self.name} sends what its training steps see, which no noise covers (privacy.sgd_rate). Use "
                    "method.source = 'clean' where it has one, another method, or privacy.unit = 'client'."
                )
            parts = torch.stack([loss(one)[0] for one in self._singles()])
            if not torch.allclose(whole, parts.mean(), atol=NEAR, rtol=NEAR):
                raise UserError(
                    f"the loss of {self.name} compares the samples of a batch with each other, so a sample has no "
                    "gradient of its own (privacy.sgd_rate). Use another method or other settings of it (for fedproto: "
                    "method.pull = 'sample')."
                )
            try:
                gradient_sum(
                    self.method, self.model, phase, client, self.batch, down, no_samples(self.engine, 0).key, 1.0
                )
            except UNMAPPED as error:
                raise UserError(
                    f"torch.vmap cannot take gradients of {self.engine.architectures[self.number]} sample by sample "
                    f"(privacy.sgd_rate): {first_line(error)[:200]}. {OTHERWISE}."
                ) from None

    def _singles(self) -> Iterator[Batch]:
        return (Batch(x[None], y[None], mask[None]) for x, y, mask in zip(*self.batch, strict=True))

    def _refuse_uploads(self, client: Client, server: Tree, none: LocalData, data: LocalData, layout: Layout) -> None:
        """Of samples, only sums by class may be sent, nothing is kept, and the server takes sums over samples."""
        down = download(self.experiment, self.engine, self.number, server)
        (up, kept), (blank, state) = (self.method.upload(self.model, client, d, down) for d in (data, none))
        single = upload_alone(self.experiment, self.engine, self.number, down, none.key, client)
        try:
            singly = vmap(single)(self.batch.x, self.batch.y)
        except UNMAPPED as error:
            raise UserError(
                f"torch.vmap cannot make the upload of {self.name} sample by sample, so privacy.sgd_rate cannot bound "
                f"it: {first_line(error)[:200]}. {OTHERWISE}."
            ) from None
        nodes, blanks, singles = (tree_flatten(tree, is_leaf=is_node)[0] for tree in (up, blank, singly))
        sent = list(zip(layout.pieces, nodes, blanks, strict=True))
        if not _same(kept, state, 0) or not all(_same(_value(a), _value(b), NEAR) for p, a, b in sent if not p.rows):
            raise UserError(
                f"{self.name} sends or keeps of a client's samples something else than class means, which "
                f"privacy.sgd_rate cannot bound. {OTHERWISE}."
            )
        made = [_of_samples(s) if p.rows else a for (p, a, _), s in zip(sent, singles, strict=True)]
        ids = torch.tensor([self.number], device=self.device)
        whole, summed = (
            self.method.aggregate(server, alone(tree), ids) for tree in (up, tree_unflatten(made, layout.form))
        )
        if not _same(whole, summed, NEAR):
            raise UserError(
                f"{self.name} needs more than the sums of a class's embeddings over samples, which is all that "
                "privacy.unit = 'sample' has. Use other settings (for fednh: method.alpha = 'counts'; for fedpr: "
                "method.divide = 'samples' or 'holders'; for fedproto: method.aggregation = 'mean' or 'weighted'), or "
                "another method."
            )


def _value(node: Mean | Each) -> Tree:
    return (node.rows if isinstance(node, Each) else node).value


def _of_samples(node: Mean | Each) -> Mean | Each:
    """The sum over an axis of samples; of what the server gets client by client, the mean."""
    mean = node.rows if isinstance(node, Each) else node
    summed = Mean(*(tree_map(lambda leaf: leaf.sum(0), part) for part in mean))
    there = (summed.weight > 0).to(summed.weight)
    return Each(Mean.of(summed.value, there)) if isinstance(node, Each) else summed


def _same(left: Tree, right: Tree, near: float) -> bool:
    """Whether two trees have the same numbers, up to rounding."""
    pairs = zip(tree_leaves(left), tree_leaves(right), strict=True)
    return all(torch.allclose(a.float(), b.float(), atol=near, rtol=near) for a, b in pairs)
