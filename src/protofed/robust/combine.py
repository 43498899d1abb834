"""Combines uploads of many clients, one row each, by a robust rule instead of summing them.

A Mean comes out as `total = centre * sum of weights`, so no method notices. If a Mean has one weight for everything,
all its tensors form one vector per client. If it has a weight per row (per class), each row is combined separately,
among the clients that have it. A client whose value is infinite or not a number takes no part.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from protofed.config.sections import Robust
from protofed.errors import UserError
from protofed.method import Each, Mean, Tree
from protofed.ops.trees import is_node, map_nodes
from protofed.robust.rules import RULES, capped, lower_median, median

Centres = dict[str, Mean]  # last aggregate of each Mean of an upload, numbered in order; weight 1 where known


def combine(rule: Robust, rows: Tree, before: Centres) -> tuple[Tree, Centres]:
    """Combine uploads with a leading axis of clients; also returns the centres, the next round's `before`."""
    nodes, form = tree_flatten(rows, is_leaf=is_node)
    old = [before.get(str(number)) for number in range(len(nodes))]
    made = [_each(rule, n) if isinstance(n, Each) else _mean(rule, n, was) for n, was in zip(nodes, old, strict=True)]
    kept = {str(i): _kept(node, old[i]) for i, node in enumerate(made) if isinstance(node, Mean)}
    return tree_unflatten(made, form), kept


def as_vectors(mean: Mean) -> tuple[Tensor, Tensor]:
    """The clients' values (R, K, D) and weights (R, K) of a Mean with an axis of clients; a value of weight 0 is 0."""
    clients, weight = len(mean.weight), mean.weight.reshape(len(mean.weight), -1)
    flat = [leaf.reshape(*weight.shape, -1) for leaf in tree_flatten(mean.total)[0]]
    total = torch.cat(flat, 2) if flat else weight.new_zeros(clients, weight.shape[1], 0)
    value = torch.where(weight[..., None] > 0, total / weight.clamp(min=1e-12)[..., None], 0.0)
    return value.transpose(0, 1), weight.T


def as_mean(like: Mean, value: Tensor, weight: Tensor) -> Mean:
    """Values (R, D) and weights (R,) as a Mean of the same form as one client's."""
    leaves, form = tree_flatten(like.total)
    shapes = [leaf.shape[1:] for leaf in leaves]
    parts = torch.split(value * weight[:, None], [math.prod(s) // len(value) for s in shapes], 1)
    total = [part.reshape(s).to(leaf.dtype) for part, s, leaf in zip(parts, shapes, leaves, strict=True)]
    return Mean(tree_unflatten(total, form), weight.reshape(like.weight.shape[1:]))


def _mean(rule: Robust, mean: Mean, before: Mean | None) -> Mean:
    if rule.rule == "none":
        return Mean(*(tree_map(lambda t: t.sum(0), part) for part in mean))
    x, weight = as_vectors(mean)
    usable = torch.isfinite(x).all(2)
    x, weight = torch.where(usable[..., None], x, 0.0), torch.where(usable, weight, 0.0)
    counts = capped(weight, rule.cap)
    start = x[:, 0] if rule.singly else _start(x, counts, before)
    return as_mean(mean, RULES[rule.rule](x, counts, start, rule), weight.sum(1))


def _start(x: Tensor, weight: Tensor, before: Mean | None) -> Tensor:
    """Where clipping starts: at the last aggregate, or, for a new row, at the median of the clients that have it."""
    if before is None:
        return median(x, weight)
    value, known = as_vectors(with_axis(before))
    if bool((known > 0).all()):
        return value[:, 0]
    return torch.where(known > 0, value[:, 0], median(x, weight))


def with_axis(tree: Tree) -> Tree:
    """The same tree with a leading axis for one client."""
    return tree_map(lambda t: t[None], tree)


def _kept(new: Mean, before: Mean | None) -> Mean:
    seen = (new.weight > 0).to(new.weight.dtype)
    if before is None:
        return Mean(new.value, seen)
    return Mean(new.otherwise(before.total), torch.maximum(seen, before.weight))


def _each(rule: Robust, each: Each) -> Each:
    """An Each stays per client, so a rule can only bound its length; it has no centre."""
    if rule.rule == "none":
        return each
    if rule.rule != "clip":
        refuse(rule)
    return within(each, lambda mean: _shorter(rule, mean))


def within(each: Each, change: Callable[[Mean], Mean]) -> Each:
    """Apply `change` to an Each's Means; its other tensors form one vector per client. Single numbers, such as counts,
    stay."""
    nodes, form = tree_flatten(each.rows, is_leaf=lambda n: isinstance(n, Mean))
    loose = [i for i, n in enumerate(nodes) if not isinstance(n, Mean) and n.is_floating_point() and n.ndim > 1]
    nodes = [change(n) if isinstance(n, Mean) else n for n in nodes]
    if loose:
        whole = change(Mean([nodes[i] for i in loose], nodes[loose[0]].new_ones(len(nodes[loose[0]]), 1)))
        for i, part in zip(loose, whole.total, strict=True):
            nodes[i] = part
    return Each(tree_unflatten(nodes, form))


def _shorter(rule: Robust, mean: Mean) -> Mean:
    """The clients' values, none longer than the bound; all rows of a class share one bound."""
    x, weight = as_vectors(mean)
    usable = torch.isfinite(x).all(2)
    x, weight = torch.where(usable[..., None], x, 0.0), torch.where(usable, weight, 0.0)
    classes = mean.weight.shape[1] if mean.weight.ndim > 1 else 1
    length = torch.linalg.vector_norm(x, dim=2)
    pool = length.reshape(classes, -1), (weight > 0).reshape(classes, -1)
    bound = torch.full_like(pool[0][:, 0], rule.norm) if rule.norm else rule.factor * lower_median(*pool)
    bound = bound.repeat_interleave(len(x) // classes)[:, None]
    shrink = torch.where(length > bound, bound / length.clamp(min=1e-30), 1.0) * usable

    def shrunk(leaf: Tensor) -> Tensor:
        by = shrink.T.reshape(*mean.weight.shape, *[1] * (leaf.ndim - mean.weight.ndim))
        return torch.where(by > 0, leaf, 0.0) * by

    return Mean(tree_map(shrunk, mean.total), weight.T.reshape(mean.weight.shape))


def refuse(rule: Robust) -> None:
    raise UserError(
        f"robust.rule = {rule.rule!r} replaces a mean over clients, but this method uploads something that is not "
        "averaged. Use robust.rule = 'clip', or a method that only averages, such as fedproto, fednh or fedavg."
    )


def check_upload(rule: Robust, up: Tree) -> None:
    """Refuse a rule that cannot combine an upload of this form."""
    if rule.rule in ("none", "clip"):
        return
    map_nodes(lambda node: refuse(rule) if isinstance(node, Each) else None, up)
