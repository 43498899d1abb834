"""Clients that own classes with related names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, MinLen

from protofed.data.dealing import CHOICE, only_domain, split_one, stream
from protofed.data.domain import Domain
from protofed.data.split import Split
from protofed.errors import UserError


@dataclass(frozen=True)
class ClassGroups:
    """Classes whose names begin alike form one client: rec.autos and rec.motorcycles, but not sci.med."""

    separator: Annotated[str, MinLen(1)] = "."
    """What ends the common part of the names."""
    min_classes: Annotated[int, Ge(1)] = 2
    """Groups with fewer classes are left out."""

    def __call__(self, domains: Sequence[Domain], clients: int, seed: int) -> Split:
        domain = only_domain(domains, clients, "groups")
        heads = [name.partition(self.separator)[0] for name in domain.class_names]
        found = [head for head in dict.fromkeys(heads) if heads.count(head) >= self.min_classes]
        if clients > len(found):
            raise UserError(
                f"clients = {clients}: {len(found)} groups have at least partition.min_classes = {self.min_classes} "
                f"classes, by what is before {self.separator!r} in their names ({', '.join(found) or 'none'}). "
                f"Use at most {len(found)} clients, or another partition."
            )
        chosen = np.sort(stream(seed, CHOICE).choice(len(found), clients, replace=False))
        group = np.array([found.index(head) if head in found else -1 for head in heads])
        train, test = (
            tuple(np.flatnonzero(group[y] == number) for number in chosen) for y in (domain.y_train, domain.y_test)
        )
        return split_one(domain, train, test)
