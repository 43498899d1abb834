"""One head for all clients from sums of embeddings, kept in a folder: clients come by adding and leave by subtracting.

Sums are exact (`ops/statistics.py`), so a head is to the bit what the same samples in one place would give, in whatever
order clients came, and without any trace of those that left.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from protofed.atomic import write_atomically
from protofed.config.experiment import Experiment
from protofed.config.files import override
from protofed.data.domain import Domain
from protofed.data.readers.kinds import kind_of
from protofed.data.sources import load as load_data
from protofed.errors import UserError, first_line
from protofed.importing import only_these
from protofed.method import Batch, Mean, Spec
from protofed.methods.oneshot import OneShot
from protofed.ops.statistics import embedding_sums, no_sums, subtracted
from protofed.ops.trees import merge
from protofed.runs.frozen import embedded_domain

ABOUT, HEAD = "about.json", "head.safetensors"
FORMAT = 1
AT_ONCE = 512  # embeddings in one sum
Tell = Callable[[str], None]
Sums = dict[str, Mean]


def plan_of(encoder: str, method: str, overrides: tuple[str, ...] = ()) -> Experiment:
    """Which encoder and which head, as an experiment; a UserError if the head is not made of sums of an encoder's
    embeddings."""
    raw = {"model": {"name": encoder}, "method": {"name": method}, "rounds": 1, "clients": 1}
    return _checked(Experiment.from_dict(override(raw, overrides)))


def read_clients_of(source: str, plan: Experiment, data_dir: Path | None) -> list[tuple[str, Domain]]:
    """A data source as one client, or a folder of data sets as one client each, with their names."""
    folder = Path(source)
    inside = (
        sorted(path for path in folder.iterdir() if kind_of(path)) if folder.is_dir() and not kind_of(folder) else []
    )
    sources = [str(path) for path in inside] or [source]
    found = []
    for name in sources:
        (domain,) = load_data(dataclasses.replace(plan.data, name=name), data_dir)
        found.append(
            (Path(name).name.removesuffix(".npz"), domain if plan.model[0].takes_tokens else domain.as_numbers())
        )
    return found


def _checked(plan: Experiment) -> Experiment:
    choice = plan.model[0]
    if not isinstance(plan.method, OneShot):
        raise UserError(
            f"--method {plan.method_name} is not made of sums in one shot. Use classmeans, lda, qda or ridge."
        )
    if not choice.frozen or choice.options.get("adapter", "none") != "none":
        raise UserError(
            f"--encoder {choice.label} is trained, in whole or in part, but sums need an encoder that stays as it is. "
            "Use an encoder by name ('protofed list models') with body = 'frozen' and without an adapter."
        )
    if getattr(plan.method, "personal", False):
        raise UserError("method.personal makes a head for each client, not one for all. Leave it out.")
    return plan


@dataclasses.dataclass
class SummedHead:
    """The sums of all clients that are in it, and who they are."""

    plan: Experiment
    classes: list[str] = dataclasses.field(default_factory=list)
    clients: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    sums: Sums = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.sums:
            self.sums = self._none()

    @property
    def method(self) -> OneShot:
        method = self.plan.method
        assert isinstance(method, OneShot)
        return method

    @classmethod
    def begun(cls, plan: Experiment, shape: tuple[int, ...]) -> "SummedHead":
        """A head without clients; the encoder treats all of their samples like those of this shape."""
        return cls(dataclasses.replace(plan, model=(plan.model[0].settled(shape),)))

    def embed(self, domain: Domain, tell: Tell) -> Domain:
        """A client's samples as embeddings."""
        return embedded_domain(self.plan.model[0], domain, self.plan.torch_device(), tell)

    def add(self, name: str, embedded: Domain) -> None:
        """Add a client, with the classes that it has."""
        if name in self.clients:
            raise UserError(f"client {name} is in this head already. Give it another name, or let it leave first.")
        for label in embedded.class_names:
            if label not in self.classes:
                self.classes.append(label)
        self.sums = _rows(self.sums, len(self.classes))
        mine = self.sums_of(embedded)
        self.sums = {key: merge(self.sums[key], mine[key]) for key in self.sums}
        self.clients[name] = {"samples": len(embedded.y_train), "sums": _digest(mine, embedded)}

    def leave(self, name: str, embedded: Domain) -> None:
        """Remove a client and its samples: the head is then what it would be without the client."""
        if name not in self.clients:
            raise UserError(f"client {name} is not in this head. It has: {', '.join(self.clients) or 'nobody'}.")
        unknown = [label for label in embedded.class_names if label not in self.classes]
        if unknown or _digest(mine := self.sums_of(embedded), embedded) != self.clients[name]["sums"]:
            raise UserError(
                f"client {name} leaves with other samples than it came with, so its sums would not come off exactly. "
                "Give the data that it came with."
            )
        self.sums = subtracted(self.sums, mine)
        del self.clients[name]

    def sums_of(self, embedded: Domain) -> Sums:
        """A client's sums, in this head's order of classes."""
        z, y = torch.from_numpy(embedded.x_train), self._labels(embedded, embedded.y_train)
        total = self._none()
        for rows in torch.split(torch.arange(len(y)), AT_ONCE):
            batch = Batch(z[rows], y[rows], torch.ones(len(rows)))
            part = embedding_sums(batch.x, batch, len(self.classes), self.method.second)
            total = {key: merge(total[key], part[key]) for key in total}
        return total

    def _none(self) -> Sums:
        """Sums of no samples."""
        one = no_sums(max(1, len(self.classes)), self.plan.model[0].encoder_width, self.method.second)
        return one if self.classes else _rows(one, 0)

    def _form_of_none(self) -> Sums:
        """Sums of no samples, without numbers: there may not be the memory for those that somebody's table asks for."""
        with torch.device("meta"):
            return self._none()

    def _labels(self, embedded: Domain, y: np.ndarray) -> Tensor:
        order = np.array([self.classes.index(label) for label in embedded.class_names], np.int64)
        return torch.from_numpy(order[y])

    def head(self) -> dict[str, Tensor]:
        """The classifier that the sums give."""
        return self.method.head(self.sums)

    def remarks(self) -> list[str]:
        """What a user should be told about it."""
        samples = sum(int(client["samples"]) for client in self.clients.values())
        spec = Spec("", len(self.classes), self.plan.model[0].encoder_width, {}, {}, 0, max(1, len(self.clients)))
        return list(self.method.remarks(spec, samples))

    def right(self, embedded: Domain) -> tuple[int, int]:
        """How many of a client's test samples the head classifies correctly, and how many there are."""
        if not len(embedded.y_test):
            return 0, 0
        scores = self.method.scores_of(self.head(), torch.from_numpy(embedded.x_test))
        return int((scores.argmax(1) == self._labels(embedded, embedded.y_test)).sum()), len(embedded.y_test)

    # on disk

    def save(self, folder: Path) -> None:
        """Write the head; what was there before counts until all of it is written."""
        folder.mkdir(parents=True, exist_ok=True)
        flat = {f"{key}/{part}": getattr(mean, part) for key, mean in self.sums.items() for part in ("total", "weight")}
        content = save({name: tensor.contiguous() for name, tensor in flat.items()})
        digest = hashlib.sha256(content).hexdigest()
        path = folder / f"sums-{digest[:16]}.safetensors"
        write_atomically(path, content)
        write_atomically(folder / HEAD, save({name: value.contiguous() for name, value in self.head().items()}))
        about = {
            "format": FORMAT, "experiment": self.plan.to_dict(), "classes": self.classes, "clients": self.clients,
            "sums": digest,
        }  # fmt: skip
        write_atomically(folder / ABOUT, json.dumps(about, indent=1).encode())
        for old in folder.glob("sums-*.safetensors"):
            if old != path:
                old.unlink()

    @classmethod
    def read(cls, folder: Path) -> "SummedHead":
        """A saved head. It may be somebody else's: nothing that it names is imported."""
        try:
            about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
            if about["format"] != FORMAT:
                raise ValueError(f"it has format {about['format']!r}, and this version reads {FORMAT}")
            _check_words(about)
            content = (folder / f"sums-{about['sums'][:16]}.safetensors").read_bytes()
            if hashlib.sha256(content).hexdigest() != about["sums"]:
                raise ValueError("its sums are not what was written")
            flat = load(content)
            with only_these(()):
                plan = _checked(Experiment.from_dict(about["experiment"]))
            sums = {key.removesuffix("/total"): Mean(flat[key], flat[key.removesuffix("total") + "weight"])
                    for key in flat if key.endswith("/total")}  # fmt: skip
            found = cls(plan, list(about["classes"]), dict(about["clients"]), sums)
            if len(sums["means"].total) != len(found.classes) or _form(sums) != _form(found._form_of_none()):
                raise ValueError("its sums do not have the form of its classes")
            if not all(bool(torch.isfinite(tensor).all()) for tensor in flat.values()):
                raise ValueError("its sums are not all numbers")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
            raise UserError(
                f"{folder} is not a whole one-shot head ({first_line(error)}). Restore it, or make a new one."
            ) from None
        return found


def _check_words(about: Mapping[str, Any]) -> None:
    """Raise ValueError or KeyError if the classes, clients or hash of the sums are not as they were written."""
    classes, clients, digest = about["classes"], about["clients"], about["sums"]
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise ValueError("it has no hash of its sums")
    names = isinstance(classes, list) and all(isinstance(label, str) for label in classes)
    if not names or len(set(classes)) < len(classes):
        raise ValueError("its classes are not a list of names")
    for client in clients.values():
        if type(client["samples"]) is not int or client["samples"] < 0 or not isinstance(client["sums"], str):
            raise ValueError("a client has no number of samples or no hash of its sums")


def _form(sums: Sums) -> dict[str, Any]:
    return {key: [(part.shape, part.dtype) for part in mean] for key, mean in sums.items()}


def _rows(sums: Mapping[str, Mean], classes: int) -> Sums:
    """Sums with rows for more classes, of which there are no samples."""
    return {key: Mean(_more(mean.total, classes), _more(mean.weight, classes)) if mean.weight.ndim else mean
            for key, mean in sums.items()}  # fmt: skip


def _more(tensor: Tensor, rows: int) -> Tensor:
    if rows < len(tensor):
        return tensor[:rows]
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])


def _digest(sums: Mapping[str, Mean], embedded: Domain) -> str:
    """The hash of a client's sums, class by name: it does not depend on other clients' classes."""
    total = hashlib.sha256()
    held = [int(row) for row in sums["means"].weight.nonzero().flatten()]
    total.update(repr(sorted({embedded.class_names[int(y)] for y in embedded.y_train})).encode())
    for key in sorted(sums):
        mean = sums[key]
        for part in (mean.total, mean.weight):
            rows = part[held] if mean.weight.ndim else part
            total.update(np.sort(rows.numpy().reshape(-1)).tobytes())
    return total.hexdigest()
