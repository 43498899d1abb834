"""What simulated attackers send instead of their true uploads.

Attackers lie about values, not weights: the server bounds a weight by the client's number of samples. For a model,
"the opposite" means the opposite of its change since the last aggregate; for prototypes, of the prototypes themselves.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from protofed.config.sections import Attack
from protofed.method import Each, Mean, Tree
from protofed.ops import random
from protofed.ops.trees import is_node
from protofed.robust.combine import Centres, as_vectors, with_axis, within


def attacked(
    attack: Attack, rows: Tree, before: Centres, keys: Sequence[Tensor | None], classes: int, pair: Sequence[int]
) -> Tree:
    """Uploads with an axis of clients, with the attackers' rows replaced.

    `before`: the centres from `combine` in the last round. `keys`: each attacker's randomness; None for an honest
    client. `pair`: the classes that `swap` exchanges.
    """
    lie = _Lie(attack, keys, classes, pair)
    nodes, form = tree_flatten(rows, is_leaf=is_node)
    return tree_unflatten([lie.node(node, before.get(str(i))) for i, node in enumerate(nodes)], form)


class _Lie:
    """One round of one attack."""

    def __init__(self, attack: Attack, keys: Sequence[Tensor | None], classes: int, pair: Sequence[int]) -> None:
        self.attack, self.keys, self.classes, self.pair = attack, keys, classes, pair
        self.bad = torch.tensor([key is not None for key in keys])

    def node(self, node: Any, before: Mean | None) -> Any:
        if self.attack.kind == "swap":
            return self._swapped(node)
        if isinstance(node, Mean):
            return self._mean(node, before)
        return within(node, lambda mean: self._mean(mean, None))

    def _mean(self, mean: Mean, before: Mean | None) -> Mean:
        x, weight = as_vectors(mean)
        bad = self.bad.to(x.device)
        lies = self._values(x, weight, bad, _about(mean, x, weight, bad, before), mean.weight.ndim == 1)
        said = (lies * weight[..., None]).transpose(0, 1)
        chosen = (bad & (weight > 0)).T  # (K, R)
        leaves, form = tree_flatten(mean.total)
        flat = [leaf.reshape(*chosen.shape, -1) for leaf in leaves]
        parts = torch.split(said, [leaf.shape[2] for leaf in flat], 2)
        made = [torch.where(chosen[..., None], new, old) for new, old in zip(parts, flat, strict=True)]
        made = [new.reshape(leaf.shape).to(leaf.dtype) for new, leaf in zip(made, leaves, strict=True)]
        return Mean(tree_unflatten(made, form), mean.weight)

    def _values(self, x: Tensor, weight: Tensor, bad: Tensor, about: Tensor, model: bool) -> Tensor:
        """What attackers send instead of x (R, K, D); `about` (R, 1, D): the origin of their change."""
        factor, kind = self.attack.strength, self.attack.kind
        if kind == "sign_flip":
            return about - factor * (x - about)
        if kind == "scale":
            return factor * x
        if kind == "backdoor" and model:
            return about + factor * (x - about)
        if kind == "backdoor" and len(x) == self.classes:
            return self._pushed(x, weight)
        if kind == "noise":
            size = (x**2).mean(2, keepdim=True).sqrt()
            return x + factor * size * torch.stack([self._drawn(key, x) for key in self.keys], 1)
        if kind == "collude":
            honest = ((weight > 0) & ~bad).to(x.dtype)[..., None]
            many = honest.sum(1, keepdim=True)
            middle = (x * honest).sum(1, keepdim=True) / many.clamp(min=1)
            spread = (((x - middle) * honest) ** 2).sum(1, keepdim=True).div(many.clamp(min=1)).sqrt()
            return torch.where(many > 0, middle - factor * spread, x)
        return x

    def _pushed(self, x: Tensor, weight: Tensor) -> Tensor:
        """Prototypes (C, K, D): all other classes pushed away from the target's, which is pulled to the trigger.

        The idea of BAPFL (arXiv 2509.12964): honest clients follow the global prototypes, so their clean samples move
        away from samples with the trigger, leaving the target as the class nearest to the trigger.
        """
        target = self.attack.target
        pushed = x + self.attack.strength * (x - x[target])
        pushed[target] = x[target]
        return torch.where(weight[target, :, None] > 0, pushed, x)

    def _drawn(self, key: Tensor | None, x: Tensor) -> Tensor:
        """An attacker's normal random numbers (R, D); zeros for an honest client."""
        shape = len(x), x.shape[2]
        return (
            x.new_zeros(shape) if key is None else random.normal(key.to(x.device), shape[0] * shape[1]).reshape(shape)
        )

    def _swapped(self, tree: Tree, name: str = "") -> Tree:
        """Swap two classes: rows of prototypes with their weights, or rows of a model's head."""
        if isinstance(tree, Mean):
            if tree.weight.ndim > 1 and tree.weight.shape[1] == self.classes:
                return Mean(*(tree_map(self._rows, part) for part in tree))
            return Mean(self._swapped(tree.total), tree.weight)
        if isinstance(tree, Each):
            return Each(self._swapped(tree.rows))
        if isinstance(tree, dict):
            return {key: self._swapped(part, key) for key, part in tree.items()}
        return self._rows(tree) if name.startswith("head.") else tree

    def _rows(self, leaf: Tensor) -> Tensor:
        if leaf.ndim < 2 or leaf.shape[1] != self.classes:
            return leaf
        order = list(range(self.classes))
        first, second = self.pair
        order[first], order[second] = second, first
        bad = self.bad.to(leaf.device).reshape(-1, *[1] * (leaf.ndim - 1))
        return torch.where(bad, leaf[:, order], leaf)


def _about(mean: Mean, x: Tensor, weight: Tensor, bad: Tensor, before: Mean | None) -> Tensor:
    """The origin of a change (R, 1, D): a model's last aggregate, in the first round the honest clients' mean; 0 for
    prototypes, which are not changes."""
    if mean.weight.ndim > 1:
        return torch.zeros_like(x[:, :1])
    if before is not None:
        return as_vectors(with_axis(before))[0]
    honest = (weight * ~bad)[..., None]
    honest = honest if bool(honest.any()) else weight[..., None]
    return (x * honest).sum(1, keepdim=True) / honest.sum(1, keepdim=True).clamp(min=1e-12)
