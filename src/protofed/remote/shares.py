"""A simulation's data, client by client, as files that the clients of a federation can be given."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from protofed.atomic import write_atomically
from protofed.config.experiment import Experiment
from protofed.data.domain import Domain
from protofed.errors import UserError
from protofed.remote.build import share_of


def export_shares(experiment: Experiment, domains: Sequence[Domain], folder: Path) -> None:
    """client-000.npz ... with each client's samples, and test.npz with all test samples for the server.

    They carry the mean and deviation of all training samples, so that a model gets the same numbers as in a simulation.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"--export {folder} is not empty. Name another folder.")
    if experiment.skew.on:
        raise UserError(
            "--export writes samples as they are, and [skew] would change them. Remove [skew] from the experiment."
        )
    folder.mkdir(parents=True, exist_ok=True)
    split = experiment.partition(domains, experiment.clients, experiment.seed)
    for number in range(split.clients):
        share = share_of(experiment, domains, split, number)
        if not len(share.y_train) or not len(share.y_test):
            raise UserError(f"client {number} has no training or no test samples in this partition. Use another one.")
        _write(folder / f"client-{number:03d}.npz", share)
    first = share_of(experiment, domains, split, 0)
    whole = domains[int(split.domain[0])]
    if len(whole.y_test):
        one = Domain(whole.name, whole.x_train[:1], whole.y_train[:1], whole.x_test, whole.y_test, whole.class_names)
        _write(folder / "test.npz", Domain(**{**vars(one), "scale": first.scale}))


def _write(path: Path, domain: Domain) -> None:
    arrays = {name: getattr(domain, name) for name in ("x_train", "y_train", "x_test", "y_test")}
    arrays["class_names"] = np.array(domain.class_names)
    if domain.scale is not None:
        arrays["mean"], arrays["std"] = domain.scale
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    write_atomically(path, content.getvalue())
