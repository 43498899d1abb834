"""The result of a federation of your own models and data."""

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import eq
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from protofed.config.experiment import Experiment
from protofed.data.readers.labels import read_labels
from protofed.data.readers.own import as_array
from protofed.errors import UserError, did_you_mean, in_python
from protofed.export import check_out, export, of_prepared
from protofed.method import Client
from protofed.models.adapted import Adapted
from protofed.models.functional import unfit
from protofed.models.own import plain
from protofed.ops.trees import deal
from protofed.runs.cohort import held_out
from protofed.runs.folder import RunFolder
from protofed.runs.measure import Result
from protofed.runs.saved import Saved, newest
from protofed.runs.setup import Prepared


class Models(list[nn.Module]):
    """One for each client, by number or by name."""

    def __init__(self, modules: Iterable[nn.Module], names: Sequence[str]) -> None:
        super().__init__(modules)
        self._names = names

    def __getitem__(self, client: Any) -> Any:
        if isinstance(client, str) and client not in self._names:
            raise UserError(f"there is no client {client!r}. {did_you_mean(client, self._names)}")
        if isinstance(client, int) and str(client) not in self._names and not -len(self) <= client < len(self):
            raise UserError(f"there is no client {client}. Known: 0 to {len(self) - 1}, or by name.")
        return super().__getitem__(self._names.index(str(client)) if str(client) in self._names else client)


class Prototypes(dict[Any, Tensor]):
    """The global prototypes by label."""

    def __init__(self, found: Mapping[Any, Tensor], labels: Sequence[Any], method: str) -> None:
        super().__init__(found)
        self._labels, self._method = labels, method

    def __missing__(self, label: Any) -> Tensor:
        if not self:
            raise UserError(f"{self._method} has no global prototypes. Check first: `if result.prototypes`.")
        if label in self._labels:
            raise UserError(
                f"there is no prototype of {label!r}: no client that took part sent one. Use .get({label!r})."
            )
        raise UserError(f"there is no class {label!r}. {did_you_mean(str(label), map(str, self))}")

    def __repr__(self) -> str:
        return f"<Prototypes of {len(self)} classes: {', '.join(map(repr, self))}>"


class Federated:
    """The result of `federate`: every client's own model, the prototypes, the numbers, and the folder of the run."""

    def __init__(self, experiment: Experiment, prepared: Prepared, folder: RunFolder, labels: list[Any]) -> None:
        state = newest(folder, experiment, *folder.restore("cpu"))
        self._experiment, self._prepared, self._state = experiment, prepared, state
        self.folder = folder.path
        """The folder of the run: docs/run-folder.md explains each file."""
        self.labels = labels
        """What you call class 0, 1, ..."""
        self.names = [domain.name for domain in prepared.domains]
        """The clients' names."""
        self.metrics = folder.summary()
        """The numbers of the run, as in summary.json."""
        self.rounds = folder.rounds()
        """The numbers of each round."""
        self._models: Models | None = None

    @property
    def accuracy(self) -> float:
        """The mean accuracy of the clients' own models on their own test data; NaN if nobody has test data."""
        return _number(self.metrics["accuracy_mean"])

    @property
    def accuracies(self) -> dict[str, float]:
        """The same for each client, by name; clients that were held out of training are left out."""
        lines = [line for line in Result(self.folder, self.metrics).clients if not line.get("held_out")]
        return {self.names[line["client"]]: _number(line["accuracy"]) for line in lines}

    @property
    def models(self) -> Models:
        """Every client's trained model, by number or name: a plain module of your own class, on the CPU and in
        evaluation mode."""
        if self._models is None:
            clients = range(self._experiment.clients)
            trained = (self._prepared.personal(number, self._client(number)) for number in clients)
            self._models = Models(trained, self.names)
        return self._models

    @property
    def global_model(self) -> nn.Module | None:
        """The global model, where the method has one."""
        server = self._experiment.method.global_client(self._state.server)
        return None if server is None else plain(self._prepared.module(0), server.params, server.buffers)

    @property
    def prototypes(self) -> dict[Any, Tensor]:
        """The global prototypes by label: (D,), or (K, D) where a class has several; empty if the method has none."""
        found = self._experiment.method.prototypes(self._state.server)
        if found is None:
            return Prototypes({}, self.labels, self.metrics["method"])
        rows = [value[weight > 0] for value, weight in zip(found.value.cpu(), found.weight.cpu(), strict=True)]
        one = found.weight.shape[1] == 1
        named = zip(self.labels, rows, strict=True)
        rows_of = {label: some[0] if one else some for label, some in named if len(some)}
        return Prototypes(rows_of, self.labels, self.metrics["method"])

    def predict(self, x: Any, client: int | str = 0) -> list[Any]:
        """Labels of inputs (N, ...) by one client's model, judged as the method does: classifier or prototypes."""
        number = self._number(client)
        method, engine = self._experiment.method, self._prepared.reference
        inputs, shape = torch.from_numpy(as_array(x, "x")), self._prepared.domains[number].shape
        if inputs.shape[1:] != shape:
            raise UserError(
                f"x has shape {tuple(np.shape(x))}, but {self.names[number]} was trained on (samples, "
                f"{', '.join(map(str, shape))}). Give such a batch; of one sample, x[None]."
            )
        inputs = inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs
        if why := unfit(engine.module(number), inputs):
            raise UserError(f"x: {why} ({engine.architectures[number]}).")
        down = deal(method.broadcast(self._state.server, torch.tensor([number])), 0)
        with torch.no_grad():
            inputs = self._embedded(inputs, number)
            scores = method.predict(engine.model(number), self._client(number), inputs, down)[method.inference]
        if method.candidates == "own":
            scores = scores.masked_fill(engine.counts([number])[0] == 0, -torch.inf)
        return [self.labels[place] for place in scores.argmax(1).tolist()]

    def score(self, x: Any, y: Any, client: int | str = 0) -> float:
        """The share of inputs whose label `predict` finds."""
        said, labels = self.predict(x, client), read_labels(y, "y")
        if len(said) != len(labels):
            raise UserError(f"there are {len(said)} samples but {len(labels)} labels. Give one label for each sample.")
        return sum(map(eq, said, labels)) / len(said) if said else math.nan

    @in_python
    def export(
        self, out: str | Path, client: int | str = 0, *, onnx: bool = True, quantile: float = 0.95
    ) -> dict[str, Any]:
        """Write a client's model (or the "global" one) into a new folder, as `protofed export` does; returns what its
        about.json says."""
        check_out(Path(out), onnx)
        found = Saved(RunFolder(self.folder), self._experiment, self._state, ())
        who = client if client == "global" else self._number(client)
        subject, _ = of_prepared(found, self._prepared, who)
        return export(subject, Path(out), onnx=onnx, quantile=quantile)

    def _number(self, client: int | str) -> int:
        """A client by its name, or else by its number."""
        found = self.names.index(str(client)) if str(client) in self.names else client
        if not isinstance(found, int) or not 0 <= found < len(self.names):
            raise UserError(f"there is no client {client!r}. {did_you_mean(str(client), self.names)}")
        if found in held_out(self._experiment):
            raise UserError(
                f"{self.names[found]} was held out of training and has no model. Its accuracy after it joined is in "
                "result.metrics."
            )
        return found

    def _embedded(self, inputs: Tensor, number: int) -> Tensor:
        """What is trained behind a frozen encoder is given its embeddings."""
        whole = self._prepared.module(number)
        if not isinstance(whole, Adapted) or not whole.frozen:
            return inputs
        embeddings: Tensor = whole.encoder()(inputs)
        return embeddings

    def _client(self, number: int) -> Client:
        kept = self._state.clients
        return kept[number] if number in kept else self._prepared.reference.client(self._experiment.method, number)

    def __repr__(self) -> str:
        many = f"{len(self.names)} client{'s' * (len(self.names) != 1)}, {len(self.labels)} classes"
        accuracy = "no test data" if math.isnan(self.accuracy) else f"accuracy {self.accuracy:.1%}"
        return f"<{self.metrics['method']}: {many}, {accuracy}, in {self.folder}>"


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
