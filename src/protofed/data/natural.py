"""The natural partition: clients are the owners that the samples came from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Lt

from protofed.data.dealing import CHOICE, TEST, TRAIN, make_split, stream
from protofed.data.domain import Domain
from protofed.data.split import Split, data_fingerprint
from protofed.errors import UserError


@dataclass(frozen=True)
class Natural:
    """One owner (a writer, a hospital) is one client, with the samples that came from it."""

    key: str = ""
    """The data's owner column to use; empty: the only one there is."""
    min_size: Annotated[int, Ge(2)] = 20
    """Owners with fewer training samples than this are left out."""
    test_fraction: Annotated[float, Ge(0), Lt(1)] = 0.2
    """Held back from an owner's training samples where the test part has none of that owner's."""
    per_class: Annotated[int, Ge(0)] = 0
    """The most training samples of each class and owner, drawn by the seed; 0: all there are."""
    test_key: str = ""
    """Another owner column: test an owner on all test samples that share its value there, such as other people's
    writing in the same alphabet; empty: on its own."""

    def __call__(self, domains: Sequence[Domain], clients: int, seed: int) -> Split:
        if domains and domains[0].computed is not None:
            return self._computed(domains, clients, seed)
        found = [(d, owner) for d, domain in enumerate(domains) for owner in self._owners(domain)]
        if not 1 <= clients <= len(found):
            raise UserError(
                f"clients = {clients}: {len(found)} owners have at least partition.min_size = {self.min_size} training "
                f"samples. Use at most {len(found)} clients, or a smaller partition.min_size."
            )
        chosen = np.sort(stream(seed, CHOICE).choice(len(found), clients, replace=False))
        rng, few = stream(seed, TEST), stream(seed, TRAIN)
        sorters = [[np.argsort(ids, kind="stable") for ids in self._ids(domain)] for domain in domains]
        train, test = [], []
        for d, owner in (found[i] for i in chosen):
            rows, own = (
                sorter[slice(*(np.searchsorted(ids, owner, side, sorter=sorter) for side in ("left", "right")))]
                for ids, sorter in zip(self._ids(domains[d]), sorters[d], strict=True)
            )
            if self.test_key:
                groups, tests = self._ids(domains[d], "test_key")
                own = np.flatnonzero(np.isin(tests, groups[rows]))
            elif len(own) == 0 and self.test_fraction:
                out = min(len(rows) - 1, max(1, round(self.test_fraction * len(rows))))
                rows = rng.permutation(rows)
                # Rows past the test part are rows of the train part: see Split.test.
                own, rows = np.sort(rows[:out]) + len(domains[d].y_test), np.sort(rows[out:])
            train.append(self._few(rows, domains[d].y_train, few))
            test.append(own)
        domain = np.array([found[i][0] for i in chosen])
        return make_split(domains, domain, tuple(train), tuple(test))

    def _computed(self, domains: Sequence[Domain], clients: int, seed: int) -> Split:
        """Every client owns what is computed for it."""
        from protofed.data.computed_batches import DrawnSplit  # few experiments compute their samples

        if self != Natural():
            raise UserError(
                f"[partition] has {self}, but {domains[0].name} computes who has what. Use partition = 'natural' alone."
            )
        if len(domains) > 1:
            raise UserError(
                f"data.name lists {len(domains)} sources, but computed data is a whole population. Name one."
            )
        computed = domains[0].computed
        assert computed is not None
        return DrawnSplit(computed, clients, seed, data_fingerprint(domains))

    def _few(self, rows: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """At most `per_class` rows of each class."""
        if not self.per_class:
            return rows
        rows = rng.permutation(rows)
        parts = [rows[y[rows] == label][: self.per_class] for label in np.unique(y[rows])]
        return np.sort(np.concatenate(parts))

    def _ids(self, domain: Domain, field: Literal["key", "test_key"] = "key") -> tuple[np.ndarray, np.ndarray]:
        """The owners of training and test samples, one for each."""
        key, known = getattr(self, field), ", ".join(sorted(domain.ids)) or "none"
        if key and key not in domain.ids:
            raise UserError(
                f"partition.{field} = {key!r}: {domain.name} has no such owner column (it has: {known}). Use one of "
                "these, or another partition."
            )
        if not key and len(domain.ids) != 1:
            raise UserError(
                f"partition.key = '': {domain.name} has {len(domain.ids)} owner columns ({known}). "
                "Set partition.key to one of them, or use another partition."
            )
        key = key or next(iter(domain.ids))
        train, test = domain.ids[key]
        if (train.dtype.kind in "US") != (test.dtype.kind in "US"):
            raise UserError(
                f"partition.{field} = {key!r}: in {domain.name} the owners of training samples are {train.dtype}, "
                f"those of test samples {test.dtype}. Save both as numbers or both as text."
            )
        if lost := sum(int(_nobody(column).sum()) for column in (train, test)):
            raise UserError(
                f"partition.{field} = {key!r}: {lost} of {len(train) + len(test)} samples of {domain.name} have no "
                "owner (NaN or empty text). "
                "Name an owner for each, or remove these samples."
            )
        return train, test

    def _owners(self, domain: Domain) -> list[np.generic]:
        names, sizes = np.unique(self._ids(domain)[0], return_counts=True)
        return list(names[sizes >= self.min_size])


def _nobody(owners: np.ndarray) -> np.ndarray:
    """Which samples have no owner."""
    if owners.dtype.kind in "US":
        return np.asarray(np.char.str_len(np.char.strip(owners)) == 0)
    return np.asarray(np.isnan(owners)) if owners.dtype.kind == "f" else np.zeros(len(owners), bool)
