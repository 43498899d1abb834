"""I2PFL against loops over single samples; who counts how much, and what is mixed with what."""

import pytest
import torch
from ragged import (
    CLASSES,
    COHORTS,
    close,
    cosine,
    embedding,
    entropy,
    first_params,
    listed,
    local_data,
    logits,
    mean_by,
    play,
    trained,
)
from torch import Tensor

from protofed.method import Batch, Mean, Params
from protofed.methods.i2pfl import I2PFL, by_distance, distance_to_mixtures
from protofed.ops import random


def mixed_apart(pairs: list[tuple[Tensor, int]], share: float) -> Tensor:
    sums: dict[int, list[Tensor]] = {}
    for i, (z, y) in enumerate(pairs):
        later = [pairs[(i + k) % len(pairs)] for k in range(1, len(pairs))]
        partner = next((u for u, other in later if other != y), None)
        goal = z if partner is None else share * z + (1 - share) * partner
        sums.setdefault(y, []).append(torch.stack([z, goal.detach()]))
    apart = []
    for rows in sums.values():
        mean, goal = torch.stack(rows).mean(0)
        apart.append(((mean - goal) ** 2).mean())
    return torch.stack(apart).mean()


def in_loops(method: I2PFL) -> tuple[Params, dict[int, Tensor]]:
    model, known = first_params(), dict[int, Tensor]()
    for round, cohort in enumerate(COHORTS):
        models, sent = [], []
        for number in cohort:
            share = float(random.uniform(local_data(number, round).key, 1))

            def loss(p: Params, batch: list[tuple[Tensor, int]], share: float = share) -> Tensor:
                parts, pairs = [], []
                for x, y in batch:
                    z = embedding(p, x)
                    pairs.append((z, y))
                    part = entropy(logits(p, z), y)
                    if y in known:
                        heat = {c: torch.exp(cosine(z, u) / method.temperature) for c, u in known.items()}
                        part = part - method.inter * torch.log(heat[y] / torch.stack(list(heat.values())).sum())
                    parts.append(part)
                return torch.stack(parts).mean() + method.intra * mixed_apart(pairs, share)

            p = trained(model, number, loss)
            models.append((float(len(listed(number))) if method.weighting == "samples" else float(number != 4), p))
            pairs = [(embedding(p, x), y) for x, y in listed(number)]
            sent.append({c: torch.stack([z for z, y in pairs if y == c]).mean(0) for _, c in pairs})
        model = mean_by(models, model)
        for c in range(CLASSES):
            if rows := [means[c] for means in sent if c in means]:
                plain = torch.stack(rows).mean(0)
                far = [float(((row - plain) ** 2).sum()) if len(rows) > 1 else 1.0 for row in rows]
                new = torch.stack([f / sum(far) * row for f, row in zip(far, rows, strict=True)]).sum(0)
                known[c] = method.keep * known[c] + (1 - method.keep) * new if c in known else new
    return model, known


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_rounds_in_loops(weighting: str) -> None:
    method = I2PFL(inter=1.5, intra=0.7, temperature=0.5, keep=0.8, weighting=weighting)  # type: ignore[arg-type]
    played, (model, known) = play(method), in_loops(method)
    for name, value in model.items():
        close(played.server["model"]["params"][name], value, name)
    prototypes = method.prototypes(played.server)
    assert prototypes.weight[:, 0].tolist() == [float(c in known) for c in range(CLASSES)]
    for c, row in known.items():
        close(prototypes.total[c, 0], row, f"class {c}")


def test_far_clients_count_more() -> None:
    """Class 0: at 0, 0 and 6, whose mean is 2: by 4, 4 and 16. Class 1: two alike. Class 2: one. Class 3: none."""
    points = torch.tensor([[[0.0], [5], [7], [0]], [[0], [5], [0], [0]], [[6], [0], [0], [0]]], dtype=torch.float64)
    weight = torch.tensor([[1.0, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.float64)
    got = by_distance(Mean.of(points, weight))
    close(got.total, torch.tensor([[4.0], [5], [7], [0]], dtype=torch.float64))
    assert got.weight.tolist() == [1, 1, 1, 0]


def test_a_mixture_takes_the_next_sample_of_another_class() -> None:
    z = torch.tensor([[1.0], [2], [4], [8], [100]], dtype=torch.float64)
    batch = Batch(z, torch.tensor([0, 0, 1, 0, 2]), torch.tensor([1.0, 1, 1, 1, 0], dtype=torch.float64))
    share = torch.tensor(0.25, dtype=torch.float64)
    # class 0 takes 4, 4 and 4 (the padding is skipped); class 1 takes 8
    goals = [sum(0.25 * own + 0.75 * 4 for own in (1, 2, 8)) / 3, 0.25 * 4 + 0.75 * 8]
    expected = ((11 / 3 - goals[0]) ** 2 + (4 - goals[1]) ** 2) / 2
    assert float(distance_to_mixtures(z, batch, share, 4)) == pytest.approx(expected, rel=1e-12)
    alone = batch._replace(y=torch.tensor([1, 1, 1, 1, 2]))
    assert float(distance_to_mixtures(z, alone, share, 4)) == 0
    assert float(distance_to_mixtures(z, batch._replace(mask=batch.mask * 0), share, 4)) == 0


def test_a_class_that_nobody_holds_keeps_its_prototype() -> None:
    method = I2PFL(keep=0.5)
    played = play(method, ((0, 2), (1,)))
    before, after = (method.prototypes(server).total[:, 0] for server in (played.servers[1], played.server))
    close(after[[0, 2, 3]], before[[0, 2, 3]])
    assert not torch.equal(after[1], before[1])


def test_the_global_model_is_the_averaged_one() -> None:
    method = I2PFL()
    server = play(method, COHORTS[:1]).server
    whole = method.global_client(server)
    close(whole.params, server["model"]["params"])
    assert whole.buffers == {}
