"""GPFL against loops over single samples and numbers; what is private, and what opens the valve."""

import pytest
import torch
from ragged import (
    CLASSES,
    COHORTS,
    DIM,
    EPOCHS,
    LABELS,
    LR,
    MODEL,
    close,
    cosine,
    embedding,
    entropy,
    listed,
    local_data,
    logits,
    mean_by,
    newcomer,
    play,
    samples,
    spec,
)
from torch import Tensor

from protofed.method import Params
from protofed.methods.gpfl import GPFL

PRIVATE, TABLE = "head.", "classes.table"
ADDED = ("classes.", "valve.")  # what has a weight decay of its own


def opened(p: Params, part: str, condition: Tensor) -> Tensor:
    """A linear layer, ReLU, and a layer norm, number by number."""
    w, b = p[f"valve.{part}.weight"], p[f"valve.{part}.bias"]
    v = [((w[d] * condition).sum() + b[d]).clamp(min=0) for d in range(DIM)]
    mean = sum(v) / DIM
    spread = sum((a - mean) ** 2 for a in v) / DIM
    scale, shift = p[f"valve.{part}.norm.weight"], p[f"valve.{part}.norm.bias"]
    return torch.stack([(v[d] - mean) / torch.sqrt(spread + 1e-5) * scale[d] + shift[d] for d in range(DIM)])


def seen(p: Params, x: Tensor, condition: Tensor) -> Tensor:
    return (embedding(p, x) * (opened(p, "scale", condition) + 1) + opened(p, "shift", condition)).clamp(min=0)


def conditions(table: Tensor, client: int) -> tuple[Tensor, Tensor]:
    rows = [table[y] for _, y in listed(client)]
    own = torch.stack(rows).mean(0) if rows else torch.zeros(DIM, dtype=torch.float64)
    return torch.stack([table[c] for c in range(CLASSES)]).mean(0), own


def loss_of(method: GPFL, p: Params, batch: list, common: Tensor, own: Tensor, received: Tensor) -> Tensor:
    parts, apart = [], []
    for x, y in batch:
        u = seen(p, x, common)
        angles = torch.stack([cosine(u, p[TABLE][c]) if float(u.detach().norm()) else u.sum() for c in range(CLASSES)])
        parts.append(entropy(logits(p, seen(p, x, own)), y) + entropy(angles, y))
        apart.append(((u - received[y]) ** 2).sum())
    far = torch.sqrt(sum(apart)) if method.length == "batch" else sum(torch.sqrt(a) for a in apart) / len(apart)  # type: ignore[arg-type]
    return torch.stack(parts).mean() + method.lam * far  # type: ignore[no-any-return]


@pytest.mark.parametrize("reading", ["paper", "official"])
def test_rounds_in_loops(reading: str) -> None:
    method = GPFL.preset(reading, lam=0.3, mu=0.05)
    played = play(method)
    start = newcomer(method).params
    server = {n: p for n, p in start.items() if not n.startswith(PRIVATE)}
    clients: dict[int, Params] = {}
    owns = {}
    for cohort in COHORTS:
        models = []
        for number in cohort:
            before = clients.get(number, start)
            table = server[TABLE]
            if method.conditions == "trained":
                table = before[TABLE] if number in clients and LABELS[number] else torch.zeros_like(table)
            common, owns[number] = conditions(table, number)
            p = before | server
            for _ in range(EPOCHS):
                for batch in samples(number):
                    leaves = {n: v.clone().requires_grad_() for n, v in p.items()}
                    loss_of(method, leaves, batch, common, owns[number], server[TABLE]).backward()  # type: ignore[no-untyped-call]
                    decay = {n: method.mu * v if n.startswith(ADDED) else 0 for n, v in p.items()}
                    slopes = {n: torch.zeros_like(v) if v.grad is None else v.grad for n, v in leaves.items()}
                    p = {n: v - LR * (slopes[n] + decay[n]) for n, v in p.items()}
            clients[number] = p
            models.append((float(len(listed(number))), {n: p[n] for n in server}))
        server = mean_by(models, server)
    assert played.server["params"].keys() == server.keys()
    for name, value in server.items():
        close(played.server["params"][name], value, name)
    x = torch.stack([x for x, _ in listed(0)])
    for number, params in clients.items():
        for name, value in params.items():
            close(played.clients[number].params[name], value, f"client {number}, {name}")
        got = method.predict(MODEL, played.clients[number], x, played.server)["head"]
        close(got, torch.stack([logits(params, seen(params, row, owns[number])) for row in x]))
    assert not torch.equal(clients[0]["head.fc.weight"], start["head.fc.weight"])


def test_heads_stay_at_home_and_the_rest_is_averaged() -> None:
    method = GPFL()
    server = method.init_server(spec())
    assert not any(name.startswith(PRIVATE) for name in server["params"])
    assert {TABLE, "valve.scale.weight", "valve.shift.norm.bias"} < server["params"].keys()
    (phase,) = method.phases()
    client = newcomer(method)
    assert phase.pull is not None
    pulled = {n for n, slope in phase.pull(client, server).items() if bool(slope.any())}
    assert pulled == {n for n in client.params if n.startswith(ADDED) and bool(client.params[n].any())}


def test_what_opens_the_valve() -> None:
    client, data = newcomer(GPFL()), local_data(2, 0)
    down = {"params": {TABLE: torch.arange(CLASSES * DIM, dtype=torch.float64).reshape(CLASSES, DIM)}, "buffers": {}}
    got = GPFL().receive(MODEL, client, data, down).memory  # type: ignore[arg-type]
    close(got["common"], down["params"][TABLE].mean(0))
    close(got["own"], down["params"][TABLE][3], "all its samples are of class 3")
    first = GPFL(conditions="trained").receive(MODEL, client, data, down)  # type: ignore[arg-type]
    assert not bool(first.memory["common"].any() | first.memory["own"].any())
    trained = client._replace(memory=client.memory | {"trained": torch.ones((), dtype=torch.float64)})
    later = GPFL(conditions="trained").receive(MODEL, trained, data, down)  # type: ignore[arg-type]
    close(later.memory["own"], client.params[TABLE][3])
    close(later.params[TABLE], down["params"][TABLE])
