"""FedPCL against loops over single samples; what is trained, and what it is judged by."""

import pytest
import torch
from ragged import (
    CLASSES,
    COHORTS,
    DIM,
    LABELS,
    MODEL,
    batches,
    class_means,
    close,
    doubled,
    embedding,
    entropy,
    listed,
    local_data,
    newcomer,
    play,
    spec,
    trained,
)
from torch import Tensor

from protofed.method import Client, Params
from protofed.methods.fedpcl import FedPCL

WIDTH = 4
Set = dict[int, Tensor]


def projected(p: Params, x: Tensor) -> Tensor:
    z = embedding(p, x)
    rows = [(p["projection.weight"][d] * z).sum() + p["projection.bias"][d] for d in range(WIDTH)]
    v = torch.stack([row.clamp(min=0) for row in rows])
    return v / torch.sqrt((v**2).sum()).clamp(min=1e-12)


def heat(v: Tensor, prototypes: Set, y: int, t: float) -> Tensor:
    """Cross-entropy over the classes that have a prototype."""
    names = sorted(prototypes)
    return entropy(torch.stack([(v * prototypes[c]).sum() / t for c in names]), names.index(y))


def in_loops(method: FedPCL) -> tuple[dict[int, Params], dict[int, Set], Set]:
    start = newcomer(method).params
    clients: dict[int, Params] = dict.fromkeys(range(len(LABELS)), start)
    pool: dict[int, Set] = {}
    means: Set = {}
    for cohort in COHORTS:
        sets = {}
        for number in cohort:

            def loss(p: Params, batch: list[tuple[Tensor, int]], pool: dict[int, Set] = pool) -> Tensor:
                parts = []
                for x, y in batch:
                    v, part = projected(p, x), torch.zeros((), dtype=torch.float64)
                    if y in means:
                        each = [heat(v, means | mine, y, method.temperature) for mine in pool.values() if mine]
                        part = torch.stack(each).sum() / (len(each) if method.over_clients == "mean" else 1)
                        part = part + (heat(v, means, y, method.temperature) if method.whole else 0)
                    parts.append(part)
                return torch.stack(parts).mean()

            clients[number] = trained(clients[number], number, loss, ("projection.",))
            sets[number] = class_means([(projected(clients[number], x), y) for x, y in listed(number)])
        pool = sets
        for c in range(CLASSES):
            if rows := [mine[c] for mine in pool.values() if c in mine]:
                means[c] = torch.stack(rows).mean(0)
    return clients, pool, means


@pytest.mark.parametrize("reading", ["paper", "official"])
def test_rounds_in_loops(reading: str) -> None:
    method = FedPCL.preset(reading, projection=WIDTH, temperature=0.5)
    played, (clients, pool, means) = play(method), in_loops(method)
    for number in played.clients:
        for name, value in clients[number].items():
            close(played.clients[number].params[name], value, f"client {number}, {name}")
    assert not torch.equal(clients[0]["projection.weight"], newcomer(method).params["projection.weight"])
    server = played.server
    for place, number in enumerate(COHORTS[-1]):
        for c in range(CLASSES):
            assert bool(server["pool"].weight[place, c, 0]) == (c in pool[number])
            close(server["pool"].total[place, c, 0], pool[number].get(c, torch.zeros(WIDTH, dtype=torch.float64)))
    x = torch.stack([x for x, _ in listed(0)])
    got = method.predict(MODEL, played.clients[0], x, server)
    assert tuple(got) == method.scores == ("head", "proto")
    mine = class_means([(projected(clients[0], x), y) for x, y in listed(0)])  # of its last round, the second
    judges = mine if method.judged_by == "own" else means
    kept = method.prototypes_of(played.clients[0], server)
    assert kept.weight[:, 0].tolist() == [float(c in judges) for c in range(CLASSES)]
    for c, judge in judges.items():
        close(kept.total[c, 0], judge, f"class {c}")
    for place, row in enumerate(x):
        v = projected(clients[0], row)
        for c in range(CLASSES):
            near = -((v - judges[c]) ** 2).mean() if c in judges else torch.tensor(-torch.inf, dtype=torch.float64)
            close(got["proto"][place, c], near, f"class {c}")
            soft = (v * means[c]).sum() / 0.5 if c in means else torch.tensor(-torch.inf, dtype=torch.float64)
            close(got["head"][place, c], soft, f"class {c}")


def test_a_class_keeps_its_mean_while_the_pool_lacks_it() -> None:
    method = FedPCL(projection=WIDTH)
    played = play(method, ((0, 2), (1, 3)))
    assert played.server["means"].weight.tolist() == [1, 1, 1, 1, 0]
    close(played.server["means"].total[2], played.server["pool"].total[1, 2, 0])
    shown = method.prototypes(play(method, ((0, 2), (1,))).server)
    assert shown.weight.tolist() == [[1], [1], [1], [1], [0]], "the means, also of classes that the pool lacks"


def test_only_the_projection_is_trained_and_only_class_means_leave() -> None:
    method = FedPCL(projection=WIDTH)
    (phase,) = method.phases()
    client = newcomer(method)
    assert [n for n in client.params if n.startswith(phase.trains)] == ["projection.weight", "projection.bias"]
    assert client.params["projection.weight"].shape == (WIDTH, DIM)
    up, kept = method.upload(MODEL, client, local_data(3, 0), method.init_server(spec()))
    assert up.keys() == {"prototypes"}
    assert up["prototypes"].rows.weight[:, 0].tolist() == [1, 1, 1, 1, 0]
    assert kept.memory["prototypes"]["known"].tolist() == [True, True, True, True, False]


def test_before_the_first_round_nothing_is_known() -> None:
    method = FedPCL(projection=WIDTH)
    client, server = newcomer(method), doubled(method.init_server(spec()))
    assert server["pool"].total.shape == (1, CLASSES, 1, WIDTH)
    assert float(method.loss(MODEL.training({}, torch.zeros(2).long()), client, batches(0)[0], server)) == 0
    got = method.predict(MODEL, client, batches(0)[0].x, server)
    assert all(bool((scores == -torch.inf).all()) for scores in got.values())


def test_a_trainable_body_is_remarked_upon() -> None:
    (said,) = FedPCL().remarks(spec(), 100)
    assert "the body of tiny keeps the weights it starts with" in said
    frozen = spec()._replace(params={n: p for n, p in spec().params.items() if n.startswith("head.")})
    assert FedPCL().remarks(frozen, 100) == ()
    assert isinstance(FedPCL().init_client(frozen), Client)
