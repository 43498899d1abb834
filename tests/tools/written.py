"""Run folders as runs write them, made up in no time: for tests of what reads them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from protofed.config.experiment import Experiment
from protofed.data.split import Split

WITHOUT = ("local", "fedavg", "fedprox", "fedper", "fedrep")  # methods that have no prototypes


def write_run(
    folder: Path,
    method: str = "fedproto",
    seed: int = 0,
    rounds: int = 12,
    clients: int = 10,
    classes: int = 6,
    changes: tuple[str, ...] = (),
    finished: bool = True,
    recorded: bool = True,
    names: list[str] | None = None,
    superclasses: list[str] | None = None,
    split_seed: int | None = None,
) -> Path:
    """A run's folder; `recorded` adds what older versions did not write."""
    plan = Experiment.load(
        "demo", f"method={method}", f"seed={seed}", f"rounds={rounds}", f"clients={clients}", *changes
    )
    rng = np.random.default_rng([seed, sum(map(ord, method))])
    folder.mkdir(parents=True)
    (folder / "experiment.toml").write_text(plan.to_toml())
    environment = {
        "protofed": "0.1.0",
        "python": "3.11",
        "command": ["bin/protofed", "run", "demo", f"method={method}"],
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    lines = [_line(i, rounds, clients, method, recorded, rng) for i in range(rounds if finished else rounds // 2)]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    counts = np.random.default_rng(seed if split_seed is None else split_seed).integers(0, 9, (clients, classes))
    counts[:, 0] += 1
    _partition(folder / "partition.npz", counts, recorded)
    if recorded:
        about = {"names": names or [f"class {c}" for c in range(classes)], "superclasses": superclasses}
        (folder / "classes.json").write_text(json.dumps(about))
        np.savez(folder / "views.npz", **views(method not in WITHOUT, rounds, classes, rng))
    if finished:
        _end(folder, method, seed, lines, counts, recorded, rng)
    return folder


def _line(i: int, rounds: int, clients: int, method: str, recorded: bool, rng: np.random.Generator) -> dict[str, Any]:
    accuracy = 0.9 - 0.6 * float(np.exp(-5 * i / rounds)) + 0.02 * rng.random()
    size = 100_000 if method in WITHOUT else 900
    line: dict[str, Any] = {
        "round": i + 1, "clients": clients, "lr": 0.05, "loss": 2 * float(np.exp(-3 * i / rounds)),
        "accuracy_mean": accuracy, "accuracy_std": 0.1, "accuracy_worst10": accuracy - 0.15,
        "accuracy_head_mean": accuracy, "accuracy_proto_mean": None if method in WITHOUT else accuracy - 0.05,
        "global_accuracy": None, "params_up": 250, "bytes_up": 0 if method == "local" else size,
        "bytes_down": 0 if method == "local" else 2 * size, "seconds_train": 0.3, "seconds": 0.4,
    }  # fmt: skip
    if recorded:
        line["parts"] = {"train": 0.2, "upload": 0.05, "aggregate": 0.05, "evaluate": 0.08, "rest": 0.02}
        kind = "weights" if method in WITHOUT else "prototypes"
        for way in ("bytes_up", "bytes_down"):
            line[f"{way}_by"] = {kind: line[way] - 100, "counts and header": 100} if line[way] else {}
    if recorded and method not in WITHOUT:
        line |= {"drift": 1 / (i + 1), "margin": 1 + i / rounds, "margin_min": 0.5 + i / rounds}
        line["theory"] = {
            "which": "theorem 1", "assumptions": "estimated from below", "L1": 2.0, "L2": 1.0, "G": 3.0, "sigma2": 0.1,
            "grad_sq": 4 / (i + 1), "lr": 0.05, "lr_max": 0.4 / (i + 1), "lam": 1.0, "lam_max": None, "holds": i < 6,
        }  # fmt: skip
    return line


def _partition(path: Path, counts: np.ndarray, recorded: bool) -> None:
    ends = np.cumsum(counts.sum(1))
    rows = tuple(np.arange(end - n, end) for end, n in zip(ends, counts.sum(1), strict=True))
    split = Split(np.zeros(len(counts)), rows, rows, fingerprint="the data")
    split.save(path)
    if recorded:
        with np.load(path) as stored:
            parts = dict(stored)
        np.savez(path, **parts, counts=counts)


def views(prototypes: bool, rounds: int, classes: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Snapshots of samples that gather around their class from round to round."""
    at = np.unique(np.linspace(1, rounds, 3).astype(int))
    samples, width, clients = 24, 8, 2 if prototypes else 0
    labels, centres = np.arange(samples) % classes, 3 * rng.normal(size=(classes, width))
    noise = rng.normal(size=(samples, width))
    near = np.linspace(0.2, 1, len(at))
    there = classes if prototypes else 0
    return {
        "rounds": at,
        "labels": labels,
        "client": np.arange(samples) % 2,
        "z": np.stack([s * centres[labels] + noise for s in near]).astype(np.float16),
        "global_prototypes": np.stack([s * centres[:there] for s in near]).astype(np.float32),
        "global_held": np.ones((len(at), there), bool),
        "global_class": np.arange(there),
        "local_clients": np.arange(clients),
        "local_prototypes": np.stack([s * centres + rng.normal(size=(clients, classes, width)) for s in near]),
        "local_held": np.ones((len(at), clients, classes), bool),
    }


def _end(
    folder: Path, method: str, seed: int, lines: list[dict[str, Any]], counts: np.ndarray, recorded: bool, rng: Any
) -> None:
    clients, classes = counts.shape
    accuracy = rng.beta(8, 2, clients)
    records = [
        {"client": i, "architecture": "cnn_digits_8", "domain": "digits", "classes": np.flatnonzero(counts[i]).tolist(),
         "train": int(counts[i].sum()), "test": 20, "rounds": len(lines), "accuracy": float(accuracy[i])}
        for i in range(clients)
    ]  # fmt: skip
    (folder / "clients.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if recorded:
        np.savez(
            folder / "confusion.npz", personal=rng.integers(0, 5, (classes, classes)) + 40 * np.eye(classes, dtype=int)
        )
    worst = np.sort(accuracy)[: -(-clients // 10)].mean()
    summary = {
        "method": method, "inference": "head", "candidates": "all", "seed": seed, "clients": clients,
        "rounds": len(lines), "accuracy_mean": accuracy.mean(), "accuracy_std": accuracy.std(),
        "accuracy_worst10": worst, "accuracy_head_mean": accuracy.mean(),
        "accuracy_proto_mean": lines[-1]["accuracy_proto_mean"], "global_accuracy": None, "pm_v": None, "pm_l": None,
        "params_up_per_round": 250, "bytes_up": sum(line["bytes_up"] for line in lines),
        "bytes_down": sum(line["bytes_down"] for line in lines), "seconds": 0.4 * len(lines), "partition": "",
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
