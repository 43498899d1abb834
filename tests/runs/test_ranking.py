"""AUC and balanced accuracy of a run are those of its models' scores, by either engine, where they are wanted."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import protofed as command
from rich.console import Console
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from torch import nn

import protofed
from protofed import Experiment, UserError, run
from protofed.cli.printing import result as show
from protofed.federated import Federated

SIZES = (30, 18, 41)


def wards() -> dict[str, Any]:
    """Three hospitals with different shares of the sick, and tests of different sizes; values are missing."""
    rng = np.random.default_rng(0)
    found = {}
    for number, size in enumerate(SIZES):
        y = (rng.random(2 * size) < 0.2 + 0.3 * number).astype(int)
        x = rng.normal(size=(2 * size, 4)) + 0.7 * y[:, None]
        x[rng.random(x.shape) < 0.2] = np.nan
        found[f"ward {number}"] = (x[:size], y[:size], x[size:], y[size:])
    return found


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return wards()


def federated(data: dict[str, Any], method: str = "fedavg", model: Any = "mlp_table", **settings: Any) -> Federated:
    return protofed.federate(model, data, method=method, rounds=3, epochs=2, settings=settings, quiet=True)


@pytest.mark.parametrize("engine", ["stacked", "reference"])
def test_numbers_are_those_of_the_models(data: dict[str, Any], engine: str) -> None:
    done = federated(data, engine={"name": engine})
    lines = [json.loads(line) for line in (done.folder / "clients.jsonl").read_text().splitlines()]
    assert done.global_model is not None
    for suffix, models in (("", done.models), ("_global", [done.global_model] * 3)):
        for line, (_, _, x, y), model in zip(lines, data.values(), models, strict=True):
            logits = model(torch.from_numpy(x).float())
            logits = (logits[1] if isinstance(logits, tuple) else logits).detach().double()
            area = roc_auc_score(y, logits[:, 1] - logits[:, 0])
            assert line[f"auc{suffix}"] == pytest.approx(area, abs=1e-3)
            right = balanced_accuracy_score(y, logits.argmax(1))
            assert line[f"balanced{suffix}"] == pytest.approx(right, abs=1e-6)
        for key in ("auc", "balanced"):
            values = [line[f"{key}{suffix}"] for line in lines]
            assert done.metrics[f"{key}{suffix}_mean"] == pytest.approx(np.mean(values))
    assert done.metrics["auc_worst10"] == min(line["auc"] for line in lines)
    assert done.metrics["balanced_worst10"] == min(line["balanced"] for line in lines)
    table = command("table", str(done.folder)).stdout
    assert "AUC" in table
    assert "balanced" in table


def test_prototypes_rank_too_and_engines_agree(data: dict[str, Any]) -> None:
    found = [federated(data, "fedproto", engine={"name": name}).metrics for name in ("stacked", "reference")]
    for key in ("auc_mean", "auc_worst10", "balanced_mean"):
        assert found[0][key] == pytest.approx(found[1][key], abs=1e-9)
    assert found[0]["auc_mean"] > 0.5
    assert "auc_global_mean" not in found[0]  # there is no global model


def test_only_where_it_is_wanted(data: dict[str, Any], tmp_path: Path) -> None:
    assert "auc_mean" not in federated(data, evaluate={"auc": "never"}).metrics
    small = ("clients=3", "rounds=1", "partition=iid", "model=mlp_digits", "record.enabled=false")
    usual = run(Experiment.load("demo", *small), tmp_path / "usual").summary
    assert "auc_mean" not in usual  # ten classes
    assert "balanced_mean" not in usual
    done = run(Experiment.load("demo", *small, "evaluate.auc=always"), tmp_path / "always")
    always = done.summary
    assert 0.5 < always["auc_mean"] <= 1
    assert always["accuracy_mean"] == usual["accuracy_mean"]
    console = Console(file=io.StringIO(), width=120)
    show(console, done)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    for words, key in (("AUC, mean over clients", "auc_mean"), ("balanced accuracy", "balanced_mean")):
        (line,) = [line for line in lines if words in line]
        assert f"{100 * always[key]:.2f} %" in line


def test_missing_values_need_a_model_that_takes_them(data: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"ward 0: sample \d+ holds NaN, a missing value.*WithMask") as caught:
        federated(data, model="mlp_digits")
    assert "\n" not in str(caught.value)
    own = nn.Sequential(protofed.models.WithMask(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    done = federated(data, model=own)
    assert 0 <= done.metrics["auc_mean"] <= 1
    x = data["ward 1"][2]
    assert len(done.predict(x, "ward 1")) == len(x)
    whole = federated({name: (*map(np.nan_to_num, part),) for name, part in data.items()}, model="mlp_digits")
    with pytest.raises(UserError, match=r"x: sample \d+ holds NaN"):
        whole.predict(x, "ward 1")


def test_an_export_takes_missing_values_where_its_model_does(data: dict[str, Any], tmp_path: Path) -> None:
    done = federated(data)
    done.export(tmp_path / "made", client=1, onnx=False)
    x = data["ward 1"][2].astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    told = command("predict", str(tmp_path / "made"), str(tmp_path / "x.npy"))
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("class") or told.stdout
