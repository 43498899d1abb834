"""The partitioners of flwr-datasets, by their names in that package."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from protofed.data.dealing import CHOICE, TRAIN, Test, only_domain, split_one, stream, tests_of
from protofed.data.domain import Domain
from protofed.data.split import Split
from protofed.errors import UserError, did_you_mean

PREFIX = "flwr:"  # partition.name = "flwr:DirichletPartitioner"
OURS = ("test", "test_size")  # keys that are not the partitioner's
SET = ("num_partitions", "seed")  # what the experiment says of every partitioner
LABEL, ROW = "label", "protofed row"


@dataclass(frozen=True)
class FromFlower:
    """A partitioner of flwr-datasets; partition.name = "flwr:DirichletPartitioner" takes its arguments as keys."""

    partitioner: str = "DirichletPartitioner"
    """Its name in flwr-datasets."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its arguments. The number of partitions, the column (label) and the seed are given if it takes them; name
    another owner column with partition_by."""
    test: Test = "share"
    """Which test samples a client gets: share, own, slice or all."""
    test_size: Annotated[int, Ge(0)] = 0
    """With test = slice: samples per client; 0: as many as there are."""

    def __call__(self, domains: Sequence[Domain], clients: int, seed: int) -> Split:
        domain = only_domain(domains, clients, PREFIX + self.partitioner)
        order = stream(seed, CHOICE).permutation(len(domain.y_train))  # as FederatedDataset shuffles
        columns = {LABEL: domain.y_train[order], ROW: order}
        columns |= {name: ids[order] for name, (ids, _) in domain.ids.items()}
        train = self._parts(columns, clients, int(stream(seed, TRAIN).integers(2**31)))
        test, notes = tests_of(self.test, self.test_size, domain, train, seed, "random")
        return split_one(domain, train, test, notes)

    def _parts(self, columns: Mapping[str, np.ndarray], clients: int, seed: int) -> tuple[np.ndarray, ...]:
        """The rows of every client, ascending."""
        kind = _find(self.partitioner)
        try:
            import datasets
        except ImportError:
            raise _missing() from None
        given = self._arguments(kind, columns, clients, seed)
        quiet = datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            made = kind(**given)
            made.dataset = datasets.Dataset.from_dict({name: list(values) for name, values in columns.items()})
            if made.num_partitions != clients:
                raise UserError(
                    f"{PREFIX}{self.partitioner} makes {made.num_partitions} partitions, but clients = {clients}. Set "
                    f"clients to {made.num_partitions}, or change the keys that say so."
                )
            parts = [made.load_partition(number) for number in range(clients)]
        except (TypeError, ValueError, KeyError, IndexError, AssertionError, NotImplementedError) as error:
            raise UserError(
                f"{PREFIX}{self.partitioner} with {_said(self.options)}: "
                f"{' '.join(str(error).split()) or type(error).__name__}"
            ) from None
        finally:
            if not quiet:
                datasets.enable_progress_bars()
        if any(ROW not in part.column_names for part in parts):
            raise UserError(
                f"{PREFIX}{self.partitioner} splits columns, not samples. Use another one, such as "
                f"{PREFIX}DirichletPartitioner."
            )
        return tuple(np.sort(np.asarray(part[ROW], dtype=np.int64)) for part in parts)

    def _arguments(self, kind: Any, columns: Mapping[str, np.ndarray], clients: int, seed: int) -> dict[str, Any]:
        known = inspect.signature(kind.__init__).parameters
        takes = [name for name in known if name not in ("self", *SET)]
        for name in self.options:
            if name not in takes:
                raise UserError(
                    f"unknown key partition.{name}: {self.partitioner} has none. {did_you_mean(name, takes)}"
                )
        by = self.options.get("partition_by", LABEL)
        if "partition_by" in takes and by not in columns:
            there = ", ".join(name for name in columns if name != ROW)
            raise UserError(f"partition.partition_by = {by!r} is not a column of the data. It has: {there}.")
        usual = {"num_partitions": clients, "seed": seed, "partition_by": LABEL}
        given = {name: value for name, value in usual.items() if name in known} | self.options
        required = [name for name, one in known.items() if one.default is one.empty and name not in (*given, "self")]
        if required:
            raise UserError(f"{PREFIX}{self.partitioner} needs partition.{required[0]}. Give it a value.")
        return given


def from_flower(name: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The section of `partition.name = "flwr:NAME"`, whose other keys are the partitioner's arguments."""
    options = {key: value for key, value in raw.items() if key not in ("name", "options", *OURS)}
    ours = {key: raw[key] for key in OURS if key in raw}
    return {"partitioner": name.removeprefix(PREFIX), "options": dict(raw.get("options", {})) | options, **ours}


def _find(name: str) -> Any:
    try:
        from flwr_datasets import partitioner
    except ImportError:
        raise _missing() from None
    kinds = [kind for kind in partitioner.__all__ if kind != "Partitioner"]
    if name not in kinds:
        raise UserError(f"partition.partitioner = {name!r} is not in flwr-datasets. {did_you_mean(name, kinds)}")
    return getattr(partitioner, name)


def _missing() -> UserError:
    return UserError(f"partition.name = '{PREFIX}...' needs flwr-datasets. Install it: pip install 'protofed[hub]'.")


def _said(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value!r}" for key, value in options.items()) or "no options"
