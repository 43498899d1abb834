"""What leaves the building: rows of small classes are withheld."""

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from protofed.method import Each, Mean, Tree
from protofed.ops.trees import map_nodes


def withhold(up: Tree, counts: Tensor, least: int) -> Tree:
    """The same upload, in which classes with fewer samples (C,) than `least` weigh nothing.

    That is every Mean with weights by class: rows of prototypes, also of several of a class. A model's parameters have
    one weight for all: they are no rows of classes.
    """
    if least <= 1:
        return up
    few_of = counts < least

    def hide(node: Any) -> Any:
        if isinstance(node, Each):
            return Each(map_nodes(hide, node.rows))
        if not isinstance(node, Mean) or node.weight.ndim == 0 or len(node.weight) != len(counts):
            return node
        return Mean(tree_map(lambda t: _zero(t, few_of), node.total), _zero(node.weight, few_of))

    return map_nodes(hide, up)


def _zero(tensor: Tensor, rows: Tensor) -> Tensor:
    return tensor.masked_fill(rows.reshape(-1, *[1] * (tensor.ndim - 1)), 0)
