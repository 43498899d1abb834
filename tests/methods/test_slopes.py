"""Whatever a method minimises, training follows the slope of its value: nothing is cut off that should be trained."""

from typing import Any

import pytest
import torch
from ragged import MODEL, batches, doubled, doubles, local_data, newcomer, play
from torch import Tensor

from protofed.local import slopes
from protofed.method import Method, Params, Phase
from protofed.methods import METHODS
from protofed.ops import random
from protofed.ops.trees import deal, under

READINGS = ("default", "paper", "official")
OTHERWISE: dict[str, dict[str, Any]] = {
    "i2pfl": {"intra": 0.0},  # the mixtures are targets, which no gradient goes through
    "fednh": {"start": "separated"},  # here are more classes than dimensions
}
ONE_SHOT = {"classmeans", "lda", "qda", "ridge"}  # train nothing
SINGLE = {"ccvr"}  # its server computes in single precision, and its clients train as FedAvg's
STEP, KEY = 1e-6, random.key("slopes")


def read(name: str, reading: str) -> Method:
    kind, fields = METHODS[name], OTHERWISE.get(name, {})
    return kind(**fields) if reading == "default" else kind.preset(reading, **fields)


NAMES = sorted(METHODS.keys() - ONE_SHOT - SINGLE)
DIFFERENT = {(name, read(name, reading)): reading for name in NAMES for reading in reversed(READINGS)}
CASES = sorted((name, reading) for (name, _), reading in DIFFERENT.items())  # many readings are the default


@pytest.mark.parametrize(("name", "reading"), CASES, ids=map("-".join, CASES))
def test_training_follows_the_slope_of_the_loss(name: str, reading: str) -> None:
    """Against central differences, in every phase, away from where a round starts."""
    method = read(name, reading)
    played = play(method)
    down = deal(method.broadcast(played.server, torch.tensor([0])), 0)
    with doubles():
        client = method.receive(MODEL, played.clients.get(0) or newcomer(method), local_data(0, 3), down)
    generator = torch.Generator().manual_seed(1)
    off = {n: p + 0.1 * torch.randn(p.shape, generator=generator).double() for n, p in client.params.items()}
    client, batch = doubled(client._replace(params=off)), batches(0)[-1]  # three samples and padding
    for phase in (*method.phases(), *method.last_phases()):
        if not phase.passes(1):
            continue

        def value(params: Params, phase: Phase = phase) -> Tensor:
            everything = client._replace(params=client.params | params)
            found = (phase.loss or method.loss)(MODEL.training({}, KEY, batch.mask), everything, batch, down)
            return found[0] if isinstance(found, tuple) else found

        got, trained = slopes(method, MODEL, phase, client, batch, down, KEY).grads, under(client.params, phase.trains)
        assert got.keys() == trained.keys()
        for key, tensor in trained.items():
            for place in {0, tensor.numel() // 2, tensor.numel() - 1}:
                step = torch.zeros(tensor.numel(), dtype=torch.float64)
                step[place] = STEP
                more, less = (value({key: tensor + sign * step.reshape(tensor.shape)}) for sign in (1, -1))
                expected = float(more - less) / (2 * STEP)
                assert float(got[key].flatten()[place]) == pytest.approx(expected, rel=1e-4, abs=1e-6), (key, place)
