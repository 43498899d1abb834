"""Robust centres of vectors: R rows (one per class, or one for a whole model), K clients, D numbers each.

`x` (R, K, D) holds the clients' values and `weight` (R, K) how much each counts. A client of weight 0 has nothing for
this row and is left out of it. Every rule returns centres (R, D): zeros if all clients are left out.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from protofed.config.sections import Robust

SLIVER = 1e-4  # a smaller part of a client's weight is rounding error
PART = 2**20  # numbers sorted at once


def capped(weight: Tensor, cap: float) -> Tensor:
    """Weights bounded by `cap` times the median of those above 0. With a cap of 0, they are all 1."""
    there = weight > 0
    if cap == 0:
        return there.to(weight.dtype)
    return torch.minimum(weight, cap * lower_median(weight, there)[:, None]) * there


def lower_median(values: Tensor, there: Tensor) -> Tensor:
    """The median (R,) of the present values (R, K): the lower of two in the middle; 0 if there are none."""
    ordered = torch.where(there, values, torch.inf).sort(1).values
    middle = ((there.sum(1) - 1).clamp(min=0) // 2)[:, None]
    return ordered.gather(1, middle)[:, 0].nan_to_num(posinf=0.0) * there.any(1)


def mean(x: Tensor, weight: Tensor) -> Tensor:
    """The weighted mean; values of weight 0 are ignored, even if they are not numbers."""
    used = torch.where(weight[..., None] > 0, x, 0.0)
    return (used * weight[..., None]).sum(1) / weight.sum(1).clamp(min=1e-12)[:, None]


def clip(x: Tensor, weight: Tensor, centre: Tensor, rule: Robust) -> Tensor:
    """The mean of x after pulling in every client that is farther from the centre than the bound."""
    away = x - centre[:, None]
    length = torch.linalg.vector_norm(away, dim=2)
    bound = torch.full_like(length[:, 0], rule.norm) if rule.norm else rule.factor * lower_median(length, weight > 0)
    shrink = torch.where(length > bound[:, None], bound[:, None] / length.clamp(min=1e-30), 1.0)
    return centre + mean(away * shrink[..., None], weight)


def centred_clip(x: Tensor, weight: Tensor, centre: Tensor, rule: Robust) -> Tensor:
    """Karimireddy, He and Jaggi, ICML 2021: v <- v + mean(clip(x - v)), several times."""
    for _ in range(rule.passes):
        centre = clip(x, weight, centre, rule)
    return centre


def _in_parts(rule: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    """A rule for single coordinates, over parts that fit a cache. It gets, for each coordinate, the clients' numbers
    (R, D, K) in ascending order, their weights, and the sums of these so far."""

    def of(part: Tensor) -> Tensor:
        wide = weight[:, None].expand(-1, part.shape[2], -1)
        ordered, order = torch.where(wide > 0, part.transpose(1, 2), torch.inf).sort(2)
        wide = wide.gather(2, order)
        return rule(torch.where(wide > 0, ordered, 0.0), wide, wide.cumsum(2))

    parts = torch.split(x, max(1, PART // max(1, x.shape[0] * x.shape[1])), 2)
    return torch.cat([of(part) for part in parts], 1)


def median(x: Tensor, weight: Tensor) -> Tensor:
    """Coordinate by coordinate, the weighted median; between two, their middle."""

    def middle(x: Tensor, weight: Tensor, so_far: Tensor) -> Tensor:
        half = so_far[..., -1:] / 2
        low = (so_far >= half).to(torch.uint8).argmax(2, keepdim=True)
        high = (so_far > half).to(torch.uint8).argmax(2, keepdim=True)
        return (x.gather(2, low) / 2 + x.gather(2, high) / 2)[..., 0]

    return _in_parts(middle, x, weight)


def trimmed(x: Tensor, weight: Tensor, tolerate: float) -> Tensor:
    """Coordinate by coordinate, the mean without the lowest and the highest clients; at least one client is left."""
    many = (weight > 0).sum(1)
    cut = torch.minimum(_ceil(tolerate, many), (many - 1).clamp(min=0) // 2) / many.clamp(min=1)
    cut = cut[:, None, None]

    def between(x: Tensor, weight: Tensor, so_far: Tensor) -> Tensor:
        whole = so_far[..., -1:]
        kept = torch.minimum(so_far, (1 - cut) * whole) - torch.maximum(so_far - weight, cut * whole)
        kept = torch.where(kept > SLIVER * weight, kept, 0.0)
        return (torch.where(kept > 0, x, 0.0) * kept).sum(2) / kept.sum(2).clamp(min=1e-12)

    return _in_parts(between, x, weight)


def geometric_median(x: Tensor, weight: Tensor, passes: int) -> Tensor:
    """Weiszfeld's algorithm (RFA, Pillutla, Kakade and Harchaoui 2022), from the coordinates' median."""
    centre = median(x, weight)
    for _ in range(passes):
        length = torch.linalg.vector_norm(x - centre[:, None], dim=2)
        usual = lower_median(length, weight > 0)[:, None] + 1e-12
        centre = mean(x, weight / torch.clamp(length / usual, min=1e-6))
    return centre


def krum(x: Tensor, weight: Tensor, tolerate: float, several: bool) -> Tensor:
    """Blanchard et al., NeurIPS 2017: of n clients, the one closest to its n - f - 2 nearest others; with `several`,
    the mean of the n - f best. One or two clients are averaged: of two, nobody can tell which is wrong."""
    there = weight > 0
    many = there.sum(1)
    f = torch.minimum(_ceil(tolerate, many), ((many - 3) // 2).clamp(min=0))
    apart = _squared_distances(x, weight)
    apart = apart.masked_fill(~there[:, None, :] | torch.eye(x.shape[1], dtype=torch.bool, device=x.device), torch.inf)
    near = (many - f - 2).clamp(min=1)
    scores = apart.sort(2).values.cumsum(2).gather(2, (near - 1)[:, None, None].expand(-1, x.shape[1], 1))[..., 0]
    order = scores.argsort(dim=1, stable=True)
    order = order.gather(1, (~there).gather(1, order).to(torch.uint8).argsort(dim=1, stable=True))  # present first
    ranks = torch.where(there, order.argsort(1), x.shape[1])
    chosen = torch.where(many < 3, many, many - f if several else torch.ones_like(many))
    return mean(x, torch.where(ranks < chosen[:, None], weight, 0.0))


def _squared_distances(x: Tensor, weight: Tensor) -> Tensor:
    """Between all pairs of clients (R, K, K), as one product; infinite where a number overflows."""
    length = torch.linalg.vector_norm(x, dim=2)
    usual = (length - lower_median(length, weight > 0)[:, None]).abs().masked_fill(weight <= 0, torch.inf).argmin(1)
    x = x - x[torch.arange(len(x), device=x.device), usual][:, None]  # relative to an ordinary client, for precision
    square = (x**2).sum(2)
    apart = square[:, :, None] + square[:, None, :] - 2 * x @ x.transpose(1, 2)
    return apart.clamp(min=0).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _ceil(share: float, many: Tensor) -> Tensor:
    return torch.ceil(share * many - 1e-6).long()


RULES: dict[str, Callable[[Tensor, Tensor, Tensor, Robust], Tensor]] = {
    "clip": clip,
    "centred_clip": centred_clip,
    "median": lambda x, weight, before, rule: median(x, weight),
    "trimmed": lambda x, weight, before, rule: trimmed(x, weight, rule.tolerate),
    "geometric_median": lambda x, weight, before, rule: geometric_median(x, weight, rule.passes),
    "krum": lambda x, weight, before, rule: krum(x, weight, rule.tolerate, several=False),
    "multi_krum": lambda x, weight, before, rule: krum(x, weight, rule.tolerate, several=True),
}
