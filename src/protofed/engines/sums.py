"""Combines and sums the results of groups of clients."""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from protofed.engines import Trained
from protofed.engines.stacks import along, join_groups
from protofed.engines.wire import Size
from protofed.method import Each, Tree
from protofed.ops.trees import map_nodes, merge


def joined_parts(parts: Sequence[Trained], order: Tensor, ordered: bool) -> Trained:
    """Combine the results of parts of a cohort; `order` puts their clients into cohort order."""
    return Trained(
        up=merged([part.up for part in parts], order, ordered),
        clients={number: client for part in parts for number, client in part.clients.items()},
        loss=along(order, join_groups([part.loss for part in parts])),
        finite=torch.cat([part.finite for part in parts])[order],
        sent=reduce(Size.__add__, [part.sent for part in parts]),
        received=reduce(Size.__add__, [part.received for part in parts]),
    )


def merged(ups: Sequence[Tree], order: Tensor, ordered: bool) -> Tree:
    """The uploads of all parts together: per-client values in cohort order, and the rest summed, or, with ordered
    sums, in that order too, to be summed later."""
    if ordered:
        return tree_map(lambda *parts: torch.cat(parts)[order], *ups)
    return map_nodes(
        lambda n: Each(tree_map(lambda t: t[order], n.rows)) if isinstance(n, Each) else n, reduce(merge, ups)
    )


def summed(rows: Tree) -> Tree:
    """Uploads summed over their axis of clients."""
    return map_nodes(
        lambda n: n if isinstance(n, Each) else tree_map(lambda t: t.sum(0) if len(t) > 1 else t[0], n), rows
    )


def summed_in_order(rows: Tree) -> Tree:
    """Uploads summed over their axis of clients, one by one in order."""
    return map_nodes(
        lambda n: n if isinstance(n, Each) else tree_map(lambda t: reduce(torch.add, t.unbind(0)), n), rows
    )


def as_row(up: Tree) -> Tree:
    """One client's merged upload with an axis of clients; an Each already has one."""
    return map_nodes(lambda n: n if isinstance(n, Each) else tree_map(lambda t: t[None], n), up)
