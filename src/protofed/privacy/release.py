"""What a noised sum of uploads consists of: vectors of bounded length, and how they become a tree of Means again.

A unit is a client, or one sample. It says two things, and each has its share of `clip`:

- values: of a Mean with one weight for all (a model), its change since it was downloaded; of a Mean with a weight per
  row (prototypes), the rows themselves, zeros where the unit has none. Of a sample, a Mean with one weight for all is
  one such row if the method trains nothing (second moments), and else stays at home, or is sent as it is if it was
  trained in steps with noise;
- which rows it has, as ones and zeros. Numbers of samples are not sent: every unit counts once for each of its rows;
- where the clip follows a quantile of the lengths: whether its values are longer than their bound, as plus or minus
  one. It is a number of the same vector, so the clip and the noise cover it like all others.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from protofed.errors import UserError
from protofed.method import Each, Mean, Tree
from protofed.ops.trees import is_node
from protofed.privacy import Privacy
from protofed.privacy.worth import Statistics, groups_of

COUNTED = 0.2  # share of clip squared that goes to which rows a unit has
LEAST = 0.5  # units that a row needs to be there at all
MARKED = 0.05  # share of clip squared that goes to whether a unit's values are longer than their bound
SHORTEST, LONGEST = 1e-9, 1e9  # clips


class Piece(NamedTuple):
    """One Mean of an upload, as a part of a vector."""

    like: Mean  # one client's, for its shapes and types
    rows: int  # 0: one weight for all
    each: bool  # the server gets it client by client
    centre: Tensor | None  # of a model: what was downloaded, flat

    @property
    def values(self) -> int:
        """How many numbers it has."""
        return sum(leaf.numel() for leaf in tree_flatten(self.like.total)[0])


class Layout:
    """How the uploads of one method lie in vectors (P + R,): P values, then R rows that are there or not. Where the
    clip follows a quantile, a mark is behind them."""

    def __init__(self, privacy: Privacy, blank: Tree, trains: bool = True) -> None:
        """`blank`: the upload of a client that has downloaded, has no sample and has not trained: its models are the
        ones that all clients start from. `trains`: whether the method trains anything."""
        self.privacy, self.form = privacy, tree_flatten(blank, is_leaf=is_node)[1]
        self.pieces = [_piece(privacy, node, trains) for node in tree_flatten(blank, is_leaf=is_node)[0]]
        if privacy.unit == "sample":  # what was trained on samples stays at home
            self.used = [piece.rows > 0 for piece in self.pieces]
        else:
            self.used = [True] * len(self.pieces)
        mine = [piece for piece, used in zip(self.pieces, self.used, strict=True) if used]
        self.values = sum(piece.values for piece in mine)
        self.rows = sum(piece.rows for piece in mine)
        self.most = sum(1 if privacy.unit == "sample" else piece.rows for piece in mine if piece.rows)
        self.marks = int(privacy.adaptive)
        self.size = self.values + self.rows + self.marks
        if not self.size and not privacy.noisy_steps:
            raise UserError("[privacy]: clients of this method send nothing that could be noised. Use unit = 'none'.")
        if self.marks and not self.values:
            raise UserError(
                "privacy.clip_quantile follows the lengths of values, and clients of this method send none. Leave it "
                "out, and give privacy.clip."
            )
        counted = COUNTED if self.rows and self.values else float(bool(self.rows))
        rest = 1 - MARKED if self.marks else 1.0
        self.bounds = math.sqrt((1 - counted) * rest) * privacy.clip, math.sqrt(counted * rest) * privacy.clip
        self.mark = math.sqrt(MARKED) * privacy.clip
        self.width = self._width(mine) if privacy.worth else 0
        self.step = self.bounds[1] / math.sqrt(self.most) if self.rows else 1.0  # what having a row adds

    def _width(self, pieces: Sequence[Piece]) -> int:
        """How many dimensions an embedding has, where only class sums of embeddings are sent."""
        leaves = [leaf for piece in pieces for leaf in tree_flatten(piece.like.total)[0]]
        if len(pieces) != 1 or len(leaves) != 1 or leaves[0].ndim != 2 or len(leaves[0]) != pieces[0].rows:
            raise UserError(
                "privacy.worth is defined for class sums of embeddings, and clients of this method send something else "
                "of their samples. Use method.name = 'fedproto' or 'classmeans', or leave it out."
            )
        width = int(leaves[0].shape[1])
        groups_of(self.privacy, width)  # refuses what gains nothing
        return width

    def _groups(self, chosen: Tensor) -> list[tuple[Tensor, float, float]]:
        """For the chosen dimensions (D,) and the others: which values (P,) they are, and their clip and noise over
        those of all."""
        groups = groups_of(self.privacy, self.width)
        which = [chosen.repeat(self.rows), ~chosen.repeat(self.rows)]
        return list(zip(which, groups.clips, groups.noises, strict=True))

    def unevenness(self, chosen: Tensor) -> Tensor:
        """The standard deviation of each number's noise (P + R,), over that of the rows' marks."""
        found = torch.ones(self.size, dtype=torch.float64, device=chosen.device)
        for which, _, noise in self._groups(chosen):
            found[: self.values][which] = noise
        return found

    def statistics(self, rows: Tree) -> Statistics:
        """Of samples' uploads. Nothing is clipped: what is computed from it has its own noise."""
        values, held = self._unclipped(rows)
        z = values.reshape(len(values), self.rows, self.width).sum(1)
        return Statistics(held.sum(0), held.T @ z, z.square().sum(0))

    def _unclipped(self, rows: Tree) -> tuple[Tensor, Tensor]:
        """Units' values (U, P), zeros where one is not finite, and which rows they have (U, R)."""
        nodes = tree_flatten(rows, is_leaf=is_node)[0]
        parts = [_parts(p, n) for p, n, used in zip(self.pieces, nodes, self.used, strict=True) if used]
        values, held = torch.cat([v for v, _ in parts], 1), torch.cat([h for _, h in parts], 1)
        return torch.where(torch.isfinite(values).all(1, keepdim=True), values, 0.0), held

    def vectors(self, rows: Tree, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Units' uploads, which have an axis of units, as vectors (U, P + R), perhaps with a mark, in double precision
        no longer than the clip, and how long their values were before (U,). `chosen`: dimensions (D,) that are clipped
        apart from the others."""
        values, held = self._unclipped(rows)
        if chosen is None:
            values, length = _shortened(values, self.bounds[0])
        else:
            length = torch.linalg.vector_norm(values, dim=1)
            parts = [_shortened(values * which, clip * self.bounds[0])[0] for which, clip, _ in self._groups(chosen)]
            values = parts[0] + parts[1]
        held, _ = _shortened(held * self.step, self.bounds[1])
        signs = torch.where(length <= self.bounds[0], 1.0, -1.0).to(values)  # else marks would be rounded to float32
        marks = (self.mark * signs)[:, None].expand(-1, self.marks)
        return torch.cat([values, held, marks], 1), length

    def next_clip(self, released: Tensor, units: int) -> float:
        """The clip of the next round, by the noised marks of so many units: the geometric update of Andrew et al.,
        Algorithm 1. What was released says it, so it costs nothing more."""
        below = min(1.0, max(0.0, 0.5 + float(released[-1]) / (2 * self.mark * units)))
        moved = self.privacy.clip * math.exp(-self.privacy.clip_rate * (below - self.privacy.clip_quantile))
        return min(LONGEST, max(SHORTEST, moved))

    def opened(
        self,
        vector: Tensor,
        units: int,
        spread: float,
        singles: Sequence[Tensor] = (),
        trained: Sequence[Mean | Each] = (),
    ) -> Tree:
        """The tree that `aggregate` gets, of the noised sum (P + R,) of so many clients' vectors; `spread`: the
        standard deviation of its noise. `singles`: the clients' own noised vectors, for what is sent client by client.
        `trained`: what was trained in steps with noise, as `models` gives it, over all clients."""
        values, held = vector[: self.values], vector[self.values : self.values + self.rows]
        least = max(LEAST, spread / self.step)
        nodes: list[Mean | Each] = []
        known = iter(trained)
        for piece, used in zip(self.pieces, self.used, strict=True):
            if not used:
                nodes.append(next(known) if trained else _zeros(piece.like))
                continue
            value, values = values[: piece.values], values[piece.values :]
            count, held = held[: piece.rows] / self.step, held[piece.rows :]
            if piece.each:
                nodes.append(self._each(piece, singles, len(values), len(held), spread))
            elif piece.rows:
                nodes.append(_as_mean(piece, value, torch.where(count >= least, count, 0.0)))
            else:
                assert piece.centre is not None
                nodes.append(_as_mean(piece, value + units * piece.centre, torch.tensor([float(units)])))
        return tree_unflatten(nodes, self.form)

    def models(self, rows: Tree) -> list[Mean | Each]:
        """What clients trained in steps with noise, of uploads with an axis of clients: every client counts once."""
        nodes = tree_flatten(rows, is_leaf=is_node)[0]
        return [_alike(node) for node, used in zip(nodes, self.used, strict=True) if not used]

    def sent(self) -> Tree:
        """The form of one client's noised upload: with every row, because noise hides which rows it has."""
        nodes: list[Mean | Each] = []
        for piece, used in zip(self.pieces, self.used, strict=True):
            weight = torch.full_like(piece.like.weight, float(used or self.privacy.noisy_steps))
            nodes.append(Each(Mean(piece.like.total, weight)) if piece.each else Mean(piece.like.total, weight))
        return tree_unflatten(nodes, self.form)

    def masked(self) -> Tree:
        """The form of what one client puts into a secure sum: its noised vector, and what it trained in steps with
        noise."""
        if not self.privacy.noisy_steps:
            return self.packed()
        rows = tree_map(lambda leaf: leaf[None], self.sent())
        return with_models(self.packed() if self.size else None, self.models(rows))

    def packed(self, vector: Tensor | None = None) -> Mean:
        """What a real client sends: its noised vector, which counts once. None: for its form alone."""
        kind = torch.float64 if self.privacy.where == "sum" else torch.float32  # a sum rounds to its grid
        whole = torch.zeros(self.size) if vector is None else vector
        return Mean(whole.to(kind), torch.ones(()))

    def _each(self, piece: Piece, singles: Sequence[Tensor], after: int, rows_after: int, spread: float) -> Each:
        """One noised Mean per client; a row is there where that is likelier than not, or of samples where enough are.
        Rows of samples are means."""
        start, end = self.values - after - piece.values, self.values - after
        last = self.values + self.rows - rows_after
        first = last - piece.rows
        if self.privacy.unit == "sample":
            least = max(LEAST, spread / math.sqrt(len(singles)) / self.step)
            counts = [one[first:last] / self.step for one in singles]
            sums = [_as_mean(piece, s[start:end], c) for s, c in zip(singles, counts, strict=True)]
            there = [(mean.weight >= least).to(mean.weight) for mean in sums]
            means = [Mean.of(mean.value, held) for mean, held in zip(sums, there, strict=True)]
            return Each(tree_map(lambda *leaves: torch.stack(leaves), *means))
        made = [_as_mean(piece, one[start:end], (one[first:last] > self.step / 2).to(one.dtype)) for one in singles]
        return Each(tree_map(lambda *leaves: torch.stack(leaves), *made))


def _piece(privacy: Privacy, node: object, trains: bool) -> Piece:
    each = isinstance(node, Each)
    mean = node.rows if isinstance(node, Each) else node
    if each and (privacy.where != "client" or not (privacy.unit == "client" or privacy.noisy_steps)):
        raise UserError(
            f"privacy.where = {privacy.where!r} adds noise to sums, but this method sends values client by client. "
            "Use unit = 'client' with where = 'client', or a method that only averages, such as fedproto or fednh."
        )
    if not isinstance(mean, Mean):
        raise UserError(
            "[privacy] can only noise means, and this method sends something else. Use a method that averages, such "
            "as fedproto, fednh, fedpr, fedavg or spfedcl."
        )
    if mean.weight.ndim or (privacy.unit == "sample" and not trains):
        return Piece(mean, mean.weight.numel(), each, None)
    _refuse_statistics(mean.total)
    return Piece(mean, 0, each, _flat(mean.total, 0) / mean.weight.to(torch.float64).clamp(min=1e-12))


def _refuse_statistics(total: Tree) -> None:
    """A variance with noise may be below zero."""
    if isinstance(total, dict) and any(leaf.numel() for leaf in tree_flatten(total.get("buffers", {}))[0]):
        raise UserError(
            "[privacy]: this model sends the running statistics of BatchNorm, which noise would spoil. Use a model "
            "without BatchNorm."
        )


def _flat(total: Tree, axes: int) -> Tensor:
    """All numbers of a tree behind its first axes, in double precision."""
    leaves = [leaf.to(torch.float64) for leaf in tree_flatten(total)[0]]
    flat = [leaf.reshape(*leaf.shape[:axes], math.prod(leaf.shape[axes:])) for leaf in leaves]
    return torch.cat(flat, axes)


def _parts(piece: Piece, node: Mean | Each) -> tuple[Tensor, Tensor]:
    """The values (U, P) of one Mean, and which rows units have (U, R)."""
    mean = node.rows if isinstance(node, Each) else node
    units = len(mean.weight)
    weight = mean.weight.to(torch.float64)
    there = (weight > 0).to(torch.float64)
    if piece.rows == 0:
        value = _flat(mean.total, 1) / weight[:, None].clamp(min=1e-12)
        assert piece.centre is not None
        return (value - piece.centre.to(value.device)) * there[:, None], value.new_zeros(units, 0)
    weight, there = weight.reshape(units, -1), there.reshape(units, -1)
    axes = mean.weight.ndim
    wide = [
        leaf.to(torch.float64).reshape(*there.shape, math.prod(leaf.shape[axes:]))
        for leaf in tree_flatten(mean.total)[0]
    ]
    rows = [torch.where(there[..., None] > 0, x / weight[..., None].clamp(min=1e-12), 0.0) for x in wide]
    return torch.cat([x.flatten(1) for x in rows], 1), there


def _shortened(vectors: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Vectors (U, N), none longer than the bound, and how long they were (U,)."""
    length = torch.linalg.vector_norm(vectors, dim=1)
    return vectors * torch.where(length > bound, bound / length.clamp(min=1e-300), 1.0)[:, None], length


def _as_mean(piece: Piece, values: Tensor, weight: Tensor) -> Mean:
    """Values (P,) and weights (R,) as a Mean of the piece's form; rows of weight 0 are zeros."""
    leaves, form = tree_flatten(piece.like.total)
    made = []
    for leaf, part in zip(leaves, torch.split(values, [leaf.numel() for leaf in leaves]), strict=True):
        rows = part.reshape(len(weight), leaf.numel() // len(weight))
        rows = torch.where(weight[:, None] > 0, rows, 0.0)
        made.append(rows.reshape(leaf.shape).to(leaf))
    return Mean(tree_unflatten(made, form), weight.reshape(piece.like.weight.shape).to(piece.like.weight))


def _alike(node: Mean | Each) -> Mean | Each:
    mean = node.rows if isinstance(node, Each) else node
    rows = Mean(Mean(mean.total, mean.weight).value, torch.ones_like(mean.weight))
    return Each(rows) if isinstance(node, Each) else rows


def with_models(noised: Mean | None, models: Sequence[Mean | Each]) -> Tree:
    """A client's noised vector, if it has one, and its models, as they are summed."""
    return {"models": list(models)} | ({} if noised is None else {"noised": noised})


def over_clients(models: Sequence[Mean | Each]) -> list[Mean | Each]:
    """Models with an axis of clients as `aggregate` takes them: the sums of those that are averaged."""
    return [
        node if isinstance(node, Each) else Mean(*(tree_map(lambda leaf: leaf.sum(0), part) for part in node))
        for node in models
    ]


def _zeros(mean: Mean) -> Mean:
    return Mean(*(tree_map(torch.zeros_like, part) for part in mean))


def noised_sum(
    layout: Layout,
    vectors: Sequence[Tensor],
    noise: float,
    draw: Callable[[int, int], Tensor],
    answers: int = 1,
    uneven: Sequence[Tensor] = (),
) -> tuple[Tensor, float, list[Tensor]]:
    """The noised sum (P + R,) of clients' vectors, the standard deviation of its noise, and the clients' own noised
    vectors.

    `draw(client, many)`: normal numbers, of the server where client is -1. `answers`: how many clients' shares make up
    the noise, where = "sum". `uneven`: for each client, how much more noise each number gets (P + R,).
    """
    spread = noise * layout.privacy.clip
    if layout.privacy.where == "server":
        whole = torch.stack(list(vectors)).sum(0)
        return whole + spread * draw(-1, layout.size).to(whole.device), spread, []
    share = spread / math.sqrt(answers) if layout.privacy.where == "sum" else spread
    noises = [share * draw(number, layout.size).to(one.device) for number, one in enumerate(vectors)]
    if uneven:
        noises = [one * more.to(one.device) for one, more in zip(noises, uneven, strict=True)]
    singles = [one + noise for one, noise in zip(vectors, noises, strict=True)]
    return torch.stack(singles).sum(0), share * math.sqrt(len(singles)), singles


def signal_to_noise(released: Tensor, spread: float) -> float:
    """How long a released vector is without its noise, over how long the noise is: estimated from what was released,
    so it costs nothing."""
    noise = len(released) * spread**2
    return math.sqrt(max(0.0, float((released**2).sum()) - noise) / noise)
