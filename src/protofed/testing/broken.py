"""A broken rule: what differed and what to do."""

import torch

from protofed.method import Tree
from protofed.testing.trees import difference, floats


class Broken(Exception):
    """What differed and what to do."""


def require(holds: bool, differed: str, remedy: str) -> None:
    if not holds:
        raise Broken(f"{differed}. {remedy}")


def require_same(left: Tree, right: Tree, tolerance: float, where: str, remedy: str) -> None:
    found = difference(left, right, tolerance)
    require(not found, f"{where}{found}", remedy)


def require_finite(tree: Tree, where: str, remedy: str) -> None:
    for place, leaf in floats(tree).items():
        require(bool(torch.isfinite(leaf).all()), f"{where}{place} is not finite", remedy)
