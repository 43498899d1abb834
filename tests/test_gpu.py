"""On a GPU, where there is one: the same as on the CPU, within rounding."""

from types import SimpleNamespace

import pytest
import torch

from protofed import Experiment, run
from protofed.engines import memory
from protofed.folder import RunFolder

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
    assert memory.whole(torch.device(device)) == 250
    assert asked == [number]
