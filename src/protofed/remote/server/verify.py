"""What comes from the other side is believed only where it has the form, the range and the size that it must have."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from protofed.config.experiment import Experiment
from protofed.config.registry import ModelChoice
from protofed.data.domain import Domain
from protofed.method import Each, Mean, Spec, Tree
from protofed.metrics import Correct, Tally
from protofed.ops.trees import deal
from protofed.remote.build import one_client
from protofed.remote.form import read_tree
from protofed.remote.protocol import Refused
from protofed.remote.server.models import made_up
from protofed.remote.settings import MOST_SAMPLES
from protofed.runs.noised import layout_around

SLACK = 1 + 1e-5  # what rounding may add to a count
MOST_LOSS = 1e9  # of one sample


def upload_form(experiment: Experiment, server: Spec, number: int, choice: ModelChoice, shape: tuple[int, ...]) -> Tree:
    """An upload of this client as the method makes it of a few made-up samples of each class: for its form alone."""
    y = made_up(server.classes)
    x = np.random.default_rng(0).random((len(y), *shape), np.float32)
    domain = Domain("form", x, y, x[:0], y[:0], tuple(map(str, range(server.classes))))
    quick = replace(experiment, local_epochs=1, batch_size=(len(y) + 1) // 2)  # of two batches: they count as two
    engine = one_client(quick, number, domain, choice)
    down = deal(experiment.method.broadcast(experiment.method.init_server(server), torch.tensor([number])), 0)
    if experiment.privacy.noisy:
        return layout_around(experiment, engine, number, engine.specs()[0], down).packed()
    return engine.update(experiment.method, number, down, 0).up


def check_counts(up: Tree, form: Tree, samples: int, path: str = "", each: bool = False) -> None:
    """Nothing is counted less than not at all, or more often than there are samples; what weighs nothing is nothing.

    Counts are whole where the form's are: a method of somebody's own may weigh by other numbers.
    """
    if isinstance(up, Tensor):
        if each and up.ndim == 0:  # a single number of one client is a count
            _check_count(up, form, samples, path)
    elif isinstance(up, Mean):
        _check_count(up.weight, form.weight, samples, path)
        _check_nothing(up, path)
    elif isinstance(up, Each):
        check_counts(up.rows, form.rows, samples, path, True)
    else:
        for key in up if isinstance(up, dict) else range(len(up)):
            check_counts(up[key], form[key], samples, f"{path}/{key}" if path else str(key), each)


def _check_count(count: Tensor, form: Tensor, samples: int, path: str) -> None:
    if not count.numel():
        return
    if bool((count < 0).any()):
        raise Refused(f"{path or 'the mean'} has a negative count ({float(count.min()):g})")
    if bool((count > max(1, samples) * SLACK).any()):
        raise Refused(f"{path or 'the mean'} counts {float(count.max()):g}, but there are {samples} samples")
    if bool((form == form.round()).all()):
        if bool((count != count.round()).any()):
            raise Refused(f"{path or 'the mean'} has a count that is not a whole number")
        if float(form.max()) == 1 < float(count.max()):  # 1 of several samples: it does not count samples
            raise Refused(f"{path or 'the mean'} counts {float(count.max()):g}, where a client counts at most once")
    once = form.ndim == 1 and float(form.sum()) <= len(made_up(len(form)))  # no sample is counted in two rows
    if once and float(count.sum()) > max(1, samples) * SLACK:
        raise Refused(f"{path or 'the mean'} counts {float(count.sum()):g} in all, but there are {samples} samples")


def _check_nothing(mean: Mean, path: str) -> None:
    nothing = mean.weight == 0
    if any(bool((leaf[nothing] != 0).any()) for leaf in tree_leaves(mean.total)):
        raise Refused(f"{path or 'the mean'} has a total other than 0 where its count is 0")


def loss_of(head: dict[str, Any], samples: int, epochs: int) -> Mean:
    """The loss that a client tells: a sum, and over how many samples of all its steps."""
    told = head.get("loss")
    if not isinstance(told, list) or len(told) != 2 or not all(type(n) in (int, float) for n in told):
        raise Refused("it tells no loss")
    largest = MOST_LOSS * MOST_SAMPLES
    if not all(-largest <= n <= largest for n in told):  # also where it is NaN, or an int beyond any float
        raise Refused("its loss is not a number, or too large to be one")
    if not 0 <= told[1] <= max(1, samples) * epochs * SLACK:
        raise Refused(f"its loss is over {told[1]:g} samples, but there are {samples}")
    if abs(told[0]) > MOST_LOSS * told[1]:
        raise Refused(f"its loss is {told[0]:g} over {told[1]:g} samples, which is too large to be a loss")
    return Mean(torch.tensor(float(told[0])), torch.tensor(float(told[1])))


def tally_form(kinds: list[str], classes: int, confusion: str) -> Tree:
    """What a client answers where it is tested: for each kind of score, right answers and samples of each class."""
    none = torch.zeros(classes, dtype=torch.float64)
    square = {"said": torch.zeros(classes, classes, dtype=torch.float64)}
    return {kind: {"right": none, "samples": none} | (square if kind == confusion else {}) for kind in kinds}


def read_tallies(body: bytes, form: Tree, most: dict[str, int]) -> dict[str, Tally]:
    """The counts of a client's tests by what was asked; none may be negative, or larger than what it is a part of.

    `most` samples there are, by what they are counted on: "own", "validation".
    """
    found: dict[str, Tally] = {}
    for asked, tally in read_tree(body, form).items():
        found[asked] = {}
        for kind, counts in tally.items():
            right, samples, said = counts["right"], counts["samples"], counts.get("said", ())
            parts = (right, samples, said) if isinstance(said, Tensor) else (right, samples)
            if any(bool(((part < 0) | (part != part.round())).any()) for part in parts):
                raise Refused(f"{asked}, {kind}: a count is negative or not whole")
            if bool((right > samples).any()) or (isinstance(said, Tensor) and bool((said.sum(1) > samples).any())):
                raise Refused(f"{asked}, {kind}: more answers than samples")
            if float(samples.sum()) > most[asked.split("/")[0]]:
                raise Refused(f"{asked}, {kind}: more samples than it told of when it joined")
            found[asked][kind] = Correct(right, samples, said)
    return found
