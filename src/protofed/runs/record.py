"""What a run keeps for its report: how prototypes move in every round, and, now and then, where samples lie."""

import zipfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from protofed.config.experiment import Experiment
from protofed.data.domain import Domain
from protofed.data.names import class_names, official_superclasses
from protofed.data.readers.files import check_unpacked
from protofed.engines import Engine
from protofed.method import Mean, Tree
from protofed.runs.cohort import taking_part
from protofed.runs.folder import RunFolder
from protofed.runs.measured_clients import spaced

VIEWS = "views.npz"
FIXED = ("labels", "client", "global_class", "local_clients")  # the same in every snapshot
TRAINED = 400  # training samples of a client that its local prototypes are taken of, at most
ROWS = 400  # global prototypes in a snapshot at most, where a class has several
SEVERAL = 8  # of one class at most

Arrays = dict[str, np.ndarray]


class Means(NamedTuple):
    """One prototype per class."""

    rows: np.ndarray  # (C, D)
    held: np.ndarray  # (C,) whether there is one


class Recorder:
    """Watches the server from round to round, and takes snapshots (views.npz) at some of them."""

    def __init__(
        self, folder: RunFolder, experiment: Experiment, engine: Engine, done: int, note: Callable[[str], None]
    ) -> None:
        """`done`: rounds that count; later snapshots are forgotten."""
        self.folder, self.engine, self.method = folder, engine, experiment.method
        self.choice = experiment.record
        self.due = set(due(experiment.rounds, self.choice.snapshots if self.choice.enabled else 0))
        widths = {spec.architecture: spec.dim for spec in engine.specs()}
        self.width, self.classes = engine.specs()[0].dim, engine.specs()[0].classes
        there = taking_part(experiment)
        some = [there[i] for i in sorted(spaced(len(there), self.choice.clients))]
        self.clients = [i for i in some if widths.get(engine.architectures[i]) == self.width]
        self._known: tuple[Tree, Means] | None = None  # a server and its class means, for the next round
        self._views: Arrays | None = None
        if folder.file(VIEWS).is_file():
            self._go_back(done, note)

    def _go_back(self, done: int, note: Callable[[str], None]) -> None:
        path = self.folder.file(VIEWS)
        try:
            check_unpacked(path)
            with np.load(path, allow_pickle=False) as stored:
                views = {name: stored[name] for name in stored.files}
            stays = views["rounds"] <= done
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            note(f"{path} is damaged ({error}); the snapshots so far are lost, the run is not")
            path.unlink()
            return
        self._views = {name: part if name in FIXED else part[stays] for name, part in views.items()}
        if not stays.all():
            self._write()

    def _write(self) -> None:
        assert self._views is not None
        self.folder.write_arrays(VIEWS, self._views)

    def round(self, before: Tree, server: Tree, round: int) -> dict[str, float | None]:
        """How the prototypes moved in this round, and how far apart they are; also takes a snapshot if one is due."""
        if not self.choice.enabled:
            return {}
        prototypes = self.method.prototypes(server)
        if round in self.due:
            self._add(self._snapshot(prototypes, round))
        if prototypes is None:
            return {}
        old = self._known[1] if self._known and self._known[0] is before else self._means(before)
        self._known = server, one_per_class(prototypes)
        return movement(old, self._known[1])

    def _means(self, server: Tree) -> Means:
        prototypes = self.method.prototypes(server)
        assert prototypes is not None
        return one_per_class(prototypes)

    def _add(self, snapshot: Arrays) -> None:
        old = self._views
        if old is None:
            self._views = snapshot
        else:
            self._views = {
                name: part if name in FIXED else np.concatenate([old[name], part]) for name, part in snapshot.items()
            }
        self._write()

    def _snapshot(self, prototypes: Mean | None, round: int) -> Arrays:
        """Where test samples of some clients lie in this round, with all prototypes; one row each."""
        each, classes, width = max(1, self.choice.samples // len(self.clients)), self.classes, self.width
        z, labels, owners = [], [], []
        for number in self.clients:
            y = self.engine.labels(number, "test").cpu()
            rows = spread_over_classes(y, each)
            if len(rows):
                z.append(self.engine.embed(self.method, number, "test", rows).cpu())
                labels.append(y[rows])
                owners.append(torch.full((len(rows),), number))
        if z:
            width = z[0].shape[1]  # of a method with embeddings of its own, such as MOON's projections
        several, which = chosen_prototypes(prototypes, classes, width)
        local = [self._local(number, width) for number in self.clients] if prototypes is not None else []
        means = torch.stack([mean.value for mean in local]) if local else torch.zeros(0, classes, width)
        held = torch.stack([mean.weight > 0 for mean in local]) if local else torch.zeros(0, classes, dtype=torch.bool)
        none = torch.zeros(0, dtype=torch.int64)
        return {
            "rounds": np.array([round]),
            "labels": torch.cat([none, *labels]).numpy(),
            "client": torch.cat([none, *owners]).numpy(),
            "z": torch.cat([torch.zeros(0, width), *z]).float().numpy()[None],
            "global_prototypes": several.total.numpy()[None],
            "global_held": several.weight.bool().numpy()[None],
            "global_class": which.numpy(),
            "local_clients": np.array(self.clients if local else [], np.int64),
            "local_prototypes": means.numpy()[None],
            "local_held": held.numpy()[None],
        }

    def _local(self, number: int, width: int) -> Mean:
        """The class means (C, D) of some of a client's training samples, by its own model."""
        y = self.engine.labels(number, "train").cpu()
        rows = spread_over_classes(y, TRAINED)
        mean = Mean(torch.zeros(self.classes, width), torch.zeros(self.classes))
        if len(rows):
            z = self.engine.embed(self.method, number, "train", rows).float().cpu()
            mean.total.index_add_(0, y[rows], z)
            mean.weight.index_add_(0, y[rows], torch.ones(len(rows)))
        return mean


def due(rounds: int, snapshots: int) -> list[int]:
    """The rounds after which a snapshot is taken: the last, the first, and some in between."""
    many = min(snapshots, rounds)
    return [rounds] if many == 1 else [1 + i * (rounds - 1) // (many - 1) for i in range(many)]


def spread_over_classes(y: Tensor, most: int) -> Tensor:
    """At most this many samples, with the same number from each class as far as possible."""
    if len(y) <= most:
        return torch.arange(len(y))
    order = y.argsort(stable=True)
    counts = y.bincount()
    turn = torch.empty_like(y)  # the rank of each sample within its class
    turn[order] = torch.arange(len(y)) - (counts.cumsum(0) - counts)[y[order]]
    queue = (turn * len(counts) + y).argsort()
    level = turn[queue[most]]  # of this one there is no room for all
    sure, rest = queue[turn[queue] < level], queue[turn[queue] == level]
    left = most - len(sure)
    return torch.cat([sure, rest[torch.arange(left) * len(rest) // max(1, left)]]).sort().values


def chosen_prototypes(prototypes: Mean | None, classes: int, width: int) -> tuple[Mean, Tensor]:
    """Prototypes (P, D) to draw, with flags (P,) for those that exist, and their classes (P,); evenly spaced if a class
    has several."""
    if prototypes is None:
        return Mean(torch.zeros(0, width), torch.zeros(0)), torch.zeros(0, dtype=torch.int64)
    total, weight = prototypes.total.float().cpu(), prototypes.weight.cpu()
    many = 1 if weight.shape[1] == 1 else max(1, min(SEVERAL, ROWS // classes))
    rows, held = torch.zeros(classes, many, width), torch.zeros(classes, many)
    for c in range(classes):
        there = weight[c].nonzero().flatten()
        there = there[torch.arange(min(many, len(there))) * len(there) // min(many, max(1, len(there)))]
        rows[c, : len(there)], held[c, : len(there)] = total[c, there], 1
    return Mean(rows.flatten(0, 1), held.flatten()), torch.arange(classes).repeat_interleave(many)


def one_per_class(prototypes: Mean) -> Means:
    """One prototype (C, D) per class, the mean of those it has, and whether it has any (C,)."""
    total, weight = prototypes.total, prototypes.weight
    if weight.shape[1] > 1:
        total, weight = (total * weight[..., None]).sum(1, keepdim=True), weight.sum(1, keepdim=True)
    rows, many = total[:, 0].double().cpu().numpy(), weight[:, 0].double().cpu().numpy()
    return Means(rows / np.maximum(many, 1)[:, None], many > 0)


def movement(old: Means, new: Means) -> dict[str, float | None]:
    """How far prototypes moved on average, and how far each is from the nearest one of another class: on average, and
    at least. None if there is nothing to compare."""
    both = old.held & new.held
    drift = np.linalg.norm(new.rows[both] - old.rows[both], axis=1)
    rows = new.rows[new.held]
    lengths = (rows**2).sum(1)
    apart = np.maximum(lengths[:, None] + lengths - 2 * rows @ rows.T, 0)
    np.fill_diagonal(apart, np.inf)
    margins = np.sqrt(apart.min(1)) if len(rows) > 1 else np.zeros(0)
    return {
        "drift": float(drift.mean()) if len(drift) else None,
        "margin": float(margins.mean()) if len(margins) else None,
        "margin_min": float(margins.min()) if len(margins) else None,
    }


def class_record(domains: Sequence[Domain]) -> dict[str, Any]:
    """Names of the classes, and their superclasses if some are known."""
    names = class_names(domains[0].name, domains[0].class_names)
    return {"names": names, "superclasses": official_superclasses(names)}
