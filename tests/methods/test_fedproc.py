"""FedProc against loops over single samples, and what becomes of its two losses."""

from typing import Any

import pytest
import torch
from ragged import (
    CLASSES,
    COHORTS,
    DIM,
    MODEL,
    batches,
    class_means,
    close,
    cosine,
    embedding,
    entropy,
    first_params,
    listed,
    logits,
    mean_by,
    play,
    trained,
)
from torch import Tensor

from protofed.method import Client, Mean, Params
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedproc import FedProc


def in_loops(method: FedProc) -> tuple[Params, dict[int, Tensor]]:
    model, known = first_params(), dict[int, Tensor]()
    for round, cohort in enumerate(COHORTS):
        alpha = max(0.0, 1 - round / method.over)
        if method.first == "classifier" and not known:
            alpha = 0.0
        models, sent = [], []
        for number in cohort:
            last: list[tuple[Tensor, int]] = []

            def loss(p: Params, batch: list[tuple[Tensor, int]], last=last, alpha=alpha) -> Tensor:
                parts = []
                for x, y in batch:
                    z = embedding(p, x)
                    last.append((z.detach(), y))
                    part = (1 - alpha) * entropy(logits(p, z), y)
                    if y in known:
                        heat = {c: torch.exp(cosine(z, u) / method.temperature) for c, u in known.items()}
                        part = part - alpha * torch.log(heat[y] / torch.stack(list(heat.values())).sum())
                    parts.append(part)
                return torch.stack(parts).mean()

            p = trained(model, number, loss)
            if method.source == "inloop":
                pairs = last[len(last) // 2 :]  # of the second of two epochs
            else:
                pairs = [(embedding(p, x), y) for x, y in listed(number)]
            models.append((float(len(listed(number)) if method.weighting == "samples" else number != 4), p))
            sent.append(class_means(pairs))
        model = mean_by(models, model)
        for c in range(CLASSES):
            if rows := [means[c] for means in sent if c in means]:
                known[c] = torch.stack(rows).mean(0)
    return model, known


@pytest.mark.parametrize(
    ("reading", "fields"),
    [("paper", {"over": 1}), ("paper", {"over": 5, "weighting": "uniform"}), ("official", {"over": 5})],
)
def test_rounds_in_loops(reading: str, fields: dict[str, Any]) -> None:
    method = FedProc.preset(reading, **fields)
    played, (model, known) = play(method), in_loops(method)
    for name, value in model.items():
        close(played.server["model"]["params"][name], value, name)
    prototypes = method.prototypes(played.server)
    assert prototypes.weight[:, 0].tolist() == [float(c in known) for c in range(CLASSES)]
    for c, row in known.items():
        close(prototypes.total[c, 0], row, f"class {c}")
    assert float(played.server["round"]) == 3


def test_the_classifier_alone_is_fedavg_and_the_contrast_alone_leaves_the_head() -> None:
    """Before there are prototypes, and once alpha is 0."""
    first = COHORTS[:1]
    close(play(FedProc(), first).server["model"], play(FedAvg(), first).server)
    nothing = play(FedProc(first="contrast"), first).server["model"]["params"]
    close(nothing, first_params(), "a loss of 0 moves nothing")
    late = play(FedProc(over=1), (*first, *first)).server["model"]
    close(late, play(FedAvg(), (*first, *first)).server)
    early = play(FedProc(over=10**6, first="contrast"), (*first, *first)).server["model"]["params"]
    moved = {n: float((value - first_params()[n]).abs().max()) for n, value in early.items()}
    assert moved["body.fc.weight"] > 1e-2
    assert max(moved["head.fc.weight"], moved["head.fc.bias"]) < 1e-5, "alpha is nearly 1"


def test_a_class_without_a_prototype_has_no_contrast() -> None:
    method, batch = FedProc(over=4), batches(0)[0]
    known = Mean(torch.eye(CLASSES, DIM, dtype=torch.float64), torch.tensor([1.0, 0, 1, 0, 0], dtype=torch.float64))
    down = {"prototypes": known, "round": torch.tensor(1.0)}
    client = Client(first_params(), {})
    value, seen = method.loss(MODEL.training({}, torch.zeros(2).long()), client, batch, down)
    parts = []
    for x, y in listed(0)[:3]:
        z = embedding(client.params, x)
        heat = {c: torch.exp(cosine(z, known.total[c]) / 0.5) for c in (0, 2)}
        part = 0.25 * entropy(logits(client.params, z), y)
        parts.append(part - (0.75 * torch.log(heat[y] / (heat[0] + heat[2])) if y in heat else 0))
    close(value, torch.stack(parts).mean())
    assert seen == ()


def test_nobody_with_samples_leaves_all_as_it_was() -> None:
    played = play(FedProc(), ((0, 1), (4,)))
    close(played.server, played.servers[1])


def test_the_global_model_is_the_averaged_one() -> None:
    method = FedProc()
    server = play(method, COHORTS[:1]).server
    whole = method.global_client(server)
    close(whole.params, server["model"]["params"])
    assert whole.buffers == {}
