"""What groups of clients give, put together and summed."""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from protofed.engines import Trained
from protofed.engines.stacks import along, join
from protofed.engines.wire import Size
from protofed.method import Each, Tree
from protofed.ops.trees import map_nodes, merge


def joined(parts: Sequence[Trained], order: Tensor, ordered: bool) -> Trained:
    """What parts of a cohort give together, where `order` brings their clients into that of the cohort."""
    return Trained(
        up=merged([part.up for part in parts], order, ordered),
        clients={number: client for part in parts for number, client in part.clients.items()},
        loss=along(order, join([part.loss for part in parts])),
        finite=torch.cat([part.finite for part in parts])[order],
        sent=reduce(Size.__add__, [part.sent for part in parts]),
        received=reduce(Size.__add__, [part.received for part in parts]),
    )


def merged(ups: Sequence[Tree], order: Tensor, ordered: bool) -> Tree:
    """The uploads of all parts together: what is seen client by client in the order of the cohort, and the rest
    summed, or, where sums are ordered, in that order too, to be summed."""
    if ordered:
        return tree_map(lambda *parts: torch.cat(parts)[order], *ups)
    return map_nodes(
        lambda n: Each(tree_map(lambda t: t[order], n.rows)) if isinstance(n, Each) else n, reduce(merge, ups)
    )


def summed(rows: Tree) -> Tree:
    """Uploads with an axis of clients summed."""
    return map_nodes(
        lambda n: n if isinstance(n, Each) else tree_map(lambda t: t.sum(0) if len(t) > 1 else t[0], n), rows
    )


def summed_in_order(rows: Tree) -> Tree:
    """Uploads with an axis of clients summed one by one, as they lie there."""
    return map_nodes(
        lambda n: n if isinstance(n, Each) else tree_map(lambda t: reduce(torch.add, t.unbind(0)), n), rows
    )


def as_row(up: Tree) -> Tree:
    """One client's merged upload with an axis of clients, which an Each has already."""
    return map_nodes(lambda n: n if isinstance(n, Each) else tree_map(lambda t: t[None], n), up)
