"""On a GPU, where there is one: the same as on the CPU, within rounding."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from protofed import Experiment, run
from protofed.data.batches import Federation
from protofed.data.domain import Domain
from protofed.data.split import Split
from protofed.engines import Engine, resources
from protofed.engines.reference import ReferenceEngine
from protofed.engines.stacked.engine import StackedEngine
from protofed.method import Method
from protofed.methods.fedproto import FedProto
from protofed.models import MODELS, Net, chain
from protofed.ops.optim import Optimizer
from protofed.runs.folder import RunFolder

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@gpu
@pytest.mark.parametrize("method", ["fedproto", "fednh", "fedavg", "creff"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_run_on_a_gpu_agrees_with_one_on_the_cpu(method: str, share: float) -> None:
    few = ("clients=6", f"participation={share}", "rounds=4", "model=cnn_digits", "record.enabled=false")
    quick = ("method.head_epochs=3", "method.steps=3") if method == "creff" else ()
    here, there = (
        run(Experiment.load("demo", f"method={method}", *few, *quick, f"device={device}"), device).folder
        for device in ("cpu", "cuda")
    )
    for one, other in zip(RunFolder(here).rounds(), RunFolder(there).rounds(), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-2)


@pytest.mark.parametrize(("device", "number"), [("cuda", 2), ("cuda:1", 1)])
def test_a_part_of_a_gpu_is_asked_for_by_number(monkeypatch: pytest.MonkeyPatch, device: str, number: int) -> None:
    asked = list[int]()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda n: (asked.append(n), 0.25)[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1000))
    assert resources.total_memory(torch.device(device)) == 250
    assert asked == [number]


# A network with BatchNorm at a learning rate at which rounding does not grow: what is uploaded, and the statistics.


def resnet(shape: tuple[int, ...], classes: int) -> nn.Module:
    return MODELS["resnet18"](shape, classes)


def small(shape: tuple[int, ...], classes: int, momentum: float = 0.1) -> nn.Module:
    body = chain(
        conv1=nn.Conv2d(shape[0], 8, 3, stride=2, padding=1, bias=False),
        bn1=nn.BatchNorm2d(8, momentum=momentum),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        bn2=nn.BatchNorm2d(16, momentum=momentum),
        relu2=nn.ReLU(),
        pool=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(),
    )
    return Net(body, chain(fc=nn.Linear(16, classes)), 16)


def trained(method: Method, build: Any, device: str, stacked: bool) -> dict[str, Tensor]:
    """Two rounds of three clients: prototypes as they are sent, and each client's buffers, on the CPU."""
    y = np.arange(60) % 3
    x = (np.random.default_rng(0).normal(size=(60, 3, 32, 32)) + y[:, None, None, None]).astype(np.float32)
    parts = (np.arange(24), np.arange(24, 40), np.arange(40, 60))
    data = [Domain("toy", x, y, x, y, ("a", "b", "c"))], Split(np.zeros(3, int), parts, parts)
    federation = Federation(*data, seed=1, batch_size=8, drop_last=True, device=device)
    how = Optimizer(lr=1e-6, momentum=0.5)
    made = ReferenceEngine(federation, [("net", build)] * 3, how, seed=1, local_epochs=1, init=method.init)
    one: Engine = StackedEngine(made) if stacked else made
    server = tree_map(lambda t: t.to(device), method.init_server(one.specs()[0]))
    found = dict[str, Tensor]()
    with full_precision():
        for round in range(2):
            done = one.train(method, server, [0, 1, 2], round)
            assert bool(done.finite.all())
            found[f"prototypes of round {round}"] = done.up["prototypes"].value.cpu()
            server = method.aggregate(server, done.up, torch.arange(3, device=device))
            one.clients = {**one.clients, **done.clients}
    for number in range(3):
        for name, value in one.clients[number].buffers.items():
            found[f"{name} of client {number}"] = value.cpu()
    return found


@contextmanager
def full_precision() -> Iterator[None]:
    """Without TF32, which cuDNN takes for convolutions unless it is told."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def same_prototypes_and_statistics(method: Method, build: Any, device: str, stacked: bool) -> None:
    """To rounding, of which eighteen layers make more than two; a wrong variance or mode would be 1e-3 apart."""
    expected, got = trained(method, build, "cpu", False), trained(method, build, device, stacked)
    assert sum("running_" in name for name in got) >= 12
    compare(got, expected, 2e-5 if build is resnet else 2e-6)


def compare(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2e-6) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(1.0, float(value.abs().max()))
        torch.testing.assert_close(
            got[name], value, atol=tolerance * scale, rtol=0, msg=lambda said, n=name: f"{n}: {said}"
        )


SOURCES = pytest.mark.parametrize("source", ["clean", "inloop"])  # statistics that were kept, or those of a batch


@SOURCES
def test_prototypes_and_batchnorm_of_stacked_clients(source: Any) -> None:
    same_prototypes_and_statistics(FedProto(source=source), small, "cpu", stacked=True)


@gpu
@SOURCES
@pytest.mark.parametrize("stacked", [False, True], ids=["in turn", "stacked"])
@pytest.mark.parametrize("build", [small, resnet])
def test_prototypes_and_batchnorm_on_a_gpu(build: Any, stacked: bool, source: Any) -> None:
    same_prototypes_and_statistics(FedProto(source=source), build, "cuda", stacked)


def test_the_comparison_sees_other_statistics_and_other_prototypes() -> None:
    right = trained(FedProto(), small, "cpu", False)
    slow = trained(FedProto(), lambda shape, classes: small(shape, classes, momentum=0.101), "cpu", False)
    inloop = trained(FedProto(source="inloop"), small, "cpu", False)
    for other, differing in ((slow, "body.bn1.running_mean of client 0"), (inloop, "prototypes of round 0")):
        with pytest.raises(AssertionError, match=differing):
            compare({differing: other[differing]}, {differing: right[differing]})
