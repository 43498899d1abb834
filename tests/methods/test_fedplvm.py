"""FedPLVM against loops over single samples, with clusters found by walking from neighbour to neighbour."""

import pytest
import torch
from ragged import (
    CLASSES,
    COHORTS,
    DIM,
    LABELS,
    MODEL,
    batches,
    close,
    cosine,
    embedding,
    entropy,
    first_params,
    listed,
    logits,
    mean_by,
    play,
    spec,
    trained,
)
from torch import Tensor

from protofed.method import Client, Mean, Params
from protofed.methods.fedplvm import FedPLVM
from protofed.ops.finch import clusters_of, clusters_of_samples


def parts_of(points: list[Tensor]) -> list[set[int]]:
    """Points that are linked by first neighbours, in the order of their first members."""
    links: dict[int, set[int]] = {i: set() for i in range(len(points))}
    for i, point in enumerate(points):
        if len(points) > 1:
            near = max((j for j in links if j != i), key=lambda j: (float(cosine(point, points[j])), -j))
            links[i].add(near)
            links[near].add(i)
    found: list[set[int]] = []
    for start in links:
        if any(start in part for part in found):
            continue
        part, edge = {start}, [start]
        while edge:
            for other in links[edge.pop()] - part:
                part.add(other)
                edge.append(other)
        found.append(part)
    return found


def clustered(points: list[Tensor]) -> list[list[Tensor]]:
    """The coarsest clusters of which there are several, in the order of their first members."""
    groups = parts_of(points)
    while len(groups) > 1:
        coarse = parts_of([torch.stack([points[i] for i in group]).mean(0) for group in groups])
        if len(coarse) in (1, len(groups)):
            break
        groups = [set().union(*(groups[k] for k in part)) for part in coarse]
    return [[points[i] for i in sorted(group)] for group in sorted(groups, key=min)]


def middle(points: list[Tensor]) -> Tensor:
    return torch.stack(points).mean(0)


def sharp(z: Tensor, u: Tensor, method: FedPLVM) -> Tensor:
    return cosine(z, u).clamp(min=1e-3) ** method.alpha


def in_loops(method: FedPLVM) -> tuple[Params, dict[int, list[Tensor]]]:
    model, known = first_params(), dict[int, list[Tensor]]()
    for cohort in COHORTS:

        def loss(p: Params, batch: list[tuple[Tensor, int]], known: dict[int, list[Tensor]] = known) -> Tensor:
            parts = []
            for x, y in batch:
                z = embedding(p, x)
                part = entropy(logits(p, z), y)
                if y in known:
                    heat = {
                        c: torch.stack([torch.exp(sharp(z, u, method) / method.temperature) for u in rows]).sum()
                        for c, rows in known.items()
                    }
                    part = part - method.lam * torch.log(heat[y] / torch.stack(list(heat.values())).sum())
                    part = part + method.lam * 2 * (1 - cosine(z, middle(known[y]))) ** 2
                parts.append(part)
            return torch.stack(parts).mean()

        models, sent = [], dict[int, list[list[Tensor]]]()
        for number in cohort:
            p = trained(model, number, loss)
            weight = len(listed(number)) if method.weighting == "samples" else bool(LABELS[number])
            models.append((float(weight), p))
            pairs = [(embedding(p, x), y) for x, y in listed(number)]
            sent[number] = []
            for c in range(CLASSES):
                groups = clustered([z for z, y in pairs if y == c])
                groups = sorted(groups, key=lambda group: -len(group))  # stable: the earlier of two alike first
                sent[number].append([middle(group) for group in groups[: method.most]])
        model = mean_by(models, model)
        known = {}
        for c in range(CLASSES):
            points = [row for number in sorted(sent) for row in sent[number][c]]
            if points:
                known[c] = [middle(group) for group in clustered(points)]
    return model, known


@pytest.mark.parametrize("most", [1, 10])
@pytest.mark.parametrize("reading", ["paper", "official"])
def test_rounds_in_loops(reading: str, most: int) -> None:
    method = FedPLVM.preset(reading, lam=0.3, temperature=0.4, most=most)
    played, (model, known) = play(method), in_loops(method)
    for name, value in model.items():
        close(played.server["model"]["params"][name], value, name)
    prototypes = method.prototypes(played.server)
    for c in range(CLASSES):
        rows = known.get(c, [])
        assert prototypes.weight[c].sum() == len(rows)
        for place, row in enumerate(rows):
            close(prototypes.total[c, place], row, f"class {c}, cluster {place}")


def test_clusters_are_made_on_the_host_from_none() -> None:
    method = FedPLVM()
    assert not method.stackable
    first = method.init_server(spec())["clusters"]
    assert first.total.shape == (CLASSES, 1, DIM)
    assert first.weight.shape == (CLASSES, 1)


def test_the_largest_clusters_of_a_client_are_sent() -> None:
    angles = torch.tensor([0.0, 2, 90, 92, 94, 200, 45, 300], dtype=torch.float64)
    z = torch.stack([torch.cos(torch.deg2rad(angles)), torch.sin(torch.deg2rad(angles))], 1)
    y, mask = torch.tensor([1, 1, 1, 1, 1, 0, 1, 1]), torch.tensor([1.0, 1, 1, 1, 1, 1, 0, 0])
    got = clusters_of_samples(z, y, mask, 3, 2)
    assert got.weight.tolist() == [[1, 0], [1, 1], [0, 0]]
    close(got.total[1], torch.stack([z[2:5].mean(0), z[:2].mean(0)]))
    close(got.total[0, 0], z[5])
    assert clusters_of_samples(z, y, mask, 3, 1).weight.tolist() == [[1], [1], [0]]


def test_clusters_of_several_clients_are_clustered_again() -> None:
    angles = torch.tensor(
        [[[0.0, 90], [0, 0]], [[3, 96], [10, 0]]], dtype=torch.float64
    )  # (2 clients, 2 classes, 2 clusters)
    points = torch.stack([torch.cos(torch.deg2rad(angles)), torch.sin(torch.deg2rad(angles))], -1)
    weight = torch.tensor([[[1.0, 1], [0, 0]], [[1, 1], [1, 0]]])
    got = clusters_of(Mean.of(points, weight), torch.tensor([8, 3]))
    assert got.weight.tolist() == [[1, 1], [1, 0]]
    close(got.total[0], torch.stack([(points[0, 0, k] + points[1, 0, k]) / 2 for k in range(2)]))
    close(got.total[1, 0], points[1, 1, 0])


def test_a_cosine_that_is_negative_has_a_loss_and_no_slope() -> None:
    batch = batches(0)[0]
    z = MODEL.embed(Client(first_params(), {}), batch.x).detach()
    away = torch.zeros(CLASSES, 1, DIM, dtype=torch.float64)
    away[batch.y[0], 0] = -z[0]
    method, known = FedPLVM(lam=1.0), torch.zeros(CLASSES, 1, dtype=torch.float64)
    known[batch.y[0]] = 1
    leaves = {n: p.clone().requires_grad_() for n, p in first_params().items()}
    training = MODEL.training({}, torch.zeros(2).long())
    loss = method.loss(training, Client(leaves, {}), batch, {"clusters": Mean(away, known)})
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(bool(torch.isfinite(p.grad).all()) for p in leaves.values() if p.grad is not None)


def test_the_global_model_is_the_averaged_one() -> None:
    method = FedPLVM()
    server = play(method, COHORTS[:1]).server
    whole = method.global_client(server)
    close(whole.params, server["model"]["params"])
    assert whole.buffers == {}
