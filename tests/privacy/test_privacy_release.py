"""Clipping, noise and the way back, computed a second time with numpy on random uploads."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map

from protofed import UserError
from protofed.method import Each, Mean, Tree
from protofed.ops import random
from protofed.privacy import Privacy
from protofed.privacy.noise import seeded
from protofed.privacy.release import COUNTED, Layout, noised_sum, signal_to_noise

CLIENTS, CLASSES, WIDTH, SHAPE = 7, 4, 3, (2, 5)
NUMBERS = CLASSES * WIDTH + math.prod(SHAPE)


def privacy(**words: Any) -> Privacy:
    return Privacy(**{"unit": "client", "epsilon": 1.0, "where": "server", **words})


def blank(model: Tensor) -> Tree:
    """What an untrained client sends: the model that it downloaded, of weight 4, and no prototype."""
    none = Mean(torch.zeros(CLASSES, WIDTH), torch.zeros(CLASSES))
    return {"model": Mean({"w": model * 4}, torch.tensor(4.0)), "prototypes": none}


def uploads(seed: int, scale: float = 3.0) -> tuple[Tree, Tensor]:
    """Random uploads of several clients, by samples of random classes, and the model that they downloaded."""
    rng = np.random.default_rng(seed)
    model = torch.tensor(rng.normal(size=SHAPE), dtype=torch.float32)
    counts = torch.tensor(rng.integers(0, 4, (CLIENTS, CLASSES)), dtype=torch.float32)
    means = torch.tensor(rng.normal(size=(CLIENTS, CLASSES, WIDTH)), dtype=torch.float32) * scale
    n = counts.sum(1)
    models = model + torch.tensor(rng.normal(size=(CLIENTS, *SHAPE)), dtype=torch.float32) * scale
    prototypes = Mean(means * counts[..., None], counts)
    return {"model": Mean({"w": models * n[:, None, None]}, n), "prototypes": prototypes}, model


def by_hand(rows: Tree, model: Tensor, clip: float) -> np.ndarray:
    """Every client's vector (K, P + R), from the words of the documentation."""
    n, counts = rows["model"].weight.numpy(), rows["prototypes"].weight.numpy()
    found = []
    for k in range(CLIENTS):
        change = rows["model"].total["w"][k].double().numpy() / max(n[k], 1) - model.double().numpy()
        own = rows["prototypes"].total[k].double().numpy() / np.maximum(counts[k], 1)[:, None]
        values = np.concatenate([change.ravel() * (n[k] > 0), own.ravel()])
        bound = clip * math.sqrt(1 - COUNTED)
        values *= min(1, bound / max(np.linalg.norm(values), 1e-300))
        found.append(np.concatenate([values, (counts[k] > 0) * clip * math.sqrt(COUNTED / CLASSES)]))
    return np.stack(found)


@given(st.integers(0, 10_000), st.floats(0.01, 100))
def test_vectors_are_those_by_hand_and_never_longer_than_the_clip(seed: int, clip: float) -> None:
    rows, model = uploads(seed)
    layout = Layout(privacy(clip=clip), blank(model))
    vectors, lengths = layout.vectors(rows)
    assert (layout.values, layout.rows) == (NUMBERS, CLASSES)
    assert float(torch.linalg.vector_norm(vectors, dim=1).max()) <= clip * (1 + 1e-12)
    np.testing.assert_allclose(vectors.numpy(), by_hand(rows, model, clip), atol=2e-6 * clip + 1e-6)
    assert len(lengths) == CLIENTS


@given(st.integers(0, 10_000))
def test_what_one_client_changes_in_the_sum_is_no_more_than_the_clip(seed: int) -> None:
    """The sensitivity: whatever a client sends, and also numbers without bounds."""
    rows, model = uploads(seed, scale=10.0 ** (seed % 9 - 3))
    who = seed % CLIENTS
    layout = Layout(privacy(clip=0.7), blank(model))
    whole, _, _ = noised_sum(layout, list(layout.vectors(rows)[0]), 0.0, no_noise)
    gone = tree_map(lambda t: t.index_fill(0, torch.tensor([who]), 0), rows)
    without, _, _ = noised_sum(layout, list(layout.vectors(gone)[0]), 0.0, no_noise)
    assert float(torch.linalg.vector_norm(whole - without)) <= 0.7 * (1 + 1e-9)
    rows["prototypes"].total[who] = torch.inf
    lied, _, _ = noised_sum(layout, list(layout.vectors(rows)[0]), 0.0, no_noise)
    assert float(torch.linalg.vector_norm(lied - without)) <= 0.7 * (1 + 1e-9)


def no_noise(client: int, many: int) -> Tensor:
    return torch.zeros(many, dtype=torch.float64)


def test_without_noise_and_clip_it_is_the_mean_in_which_all_clients_count_alike() -> None:
    rows, model = uploads(1)
    rows["model"].weight[:] = rows["model"].weight.clamp(min=1)  # everybody has samples
    layout = Layout(privacy(clip=1000.0), blank(model))
    vector, _, _ = noised_sum(layout, list(layout.vectors(rows)[0]), 0.0, no_noise)
    up = layout.opened(vector, CLIENTS, 0.0)
    held = (rows["prototypes"].weight > 0).float()
    means = rows["prototypes"].total / rows["prototypes"].weight.clamp(min=1)[..., None]
    assert torch.allclose(up["prototypes"].weight, held.sum(0), atol=1e-4)
    assert torch.allclose(up["prototypes"].value, means.sum(0) / held.sum(0)[:, None], atol=1e-4)
    models = rows["model"].total["w"] / rows["model"].weight[:, None, None]
    assert float(up["model"].weight) == CLIENTS
    assert torch.allclose(up["model"].value["w"], models.mean(0), atol=1e-4)


def test_a_row_whose_count_is_within_the_noise_is_absent() -> None:
    _, model = uploads(1)
    layout = Layout(privacy(clip=1.0), blank(model))
    vector = torch.zeros(layout.size, dtype=torch.float64)
    vector[layout.values] = 3 * layout.step  # three clients have the first class
    assert layout.opened(vector, CLIENTS, 2.9 * layout.step)["prototypes"].weight[0] == pytest.approx(3)
    up = layout.opened(vector, CLIENTS, 3.1 * layout.step)["prototypes"]
    assert up.weight[0] == 0
    assert not up.total.any()


@pytest.mark.parametrize(
    ("where", "answers", "factor"), [("server", 1, 1.0), ("client", 1, 7**0.5), ("sum", 4, (7 / 4) ** 0.5)]
)
def test_the_noise_is_as_large_as_it_says(where: str, answers: int, factor: float) -> None:
    rows, model = uploads(2)
    layout = Layout(privacy(clip=0.5, where=where), blank(model))
    vectors = list(layout.vectors(rows)[0])
    clean = torch.stack(vectors).sum(0)
    found, told = [], []
    for trial in range(400):
        released, spread, singles = noised_sum(
            layout, vectors, 2.0, lambda who, many, t=trial: seeded(random.key(t, who), many), answers
        )
        found.append(released - clean)
        told.append(spread)
        assert len(singles) == (0 if where == "server" else CLIENTS)
    noise = torch.stack(found)
    assert told == pytest.approx([2.0 * 0.5 * factor] * 400)
    assert float(noise.std()) == pytest.approx(2.0 * 0.5 * factor, rel=0.03)
    assert abs(float(noise.mean())) < 0.05
    covariance = noise.T @ noise / 400 - torch.eye(layout.size) * float(noise.var())
    assert float(covariance.abs().max()) < 0.5 * float(noise.var())  # no two numbers share their noise
    if where == "client":  # what a client sends is noised enough by itself
        single = torch.stack([s - v for s, v in zip(singles, vectors, strict=True)])
        assert float(single.std()) == pytest.approx(1.0, rel=0.15)


def test_what_is_sent_client_by_client_is_noised_by_each() -> None:
    pool = Mean(torch.zeros(CLASSES, 2, WIDTH), torch.zeros(CLASSES, 2))
    layout = Layout(
        privacy(where="client", clip=50.0), {"pool": Each(pool), "other": Mean(torch.zeros(2, 1), torch.zeros(2))}
    )
    held = torch.zeros(CLIENTS, CLASSES, 2)
    held[:, 1, 0] = 5.0
    value = torch.arange(CLIENTS * CLASSES * 2 * WIDTH, dtype=torch.float32).reshape(CLIENTS, CLASSES, 2, WIDTH) / 10
    other = Mean(torch.ones(CLIENTS, 2, 1), torch.ones(CLIENTS, 2))
    vectors = list(layout.vectors({"pool": Each(Mean(value * held[..., None], held)), "other": other})[0])
    released, spread, singles = noised_sum(layout, vectors, 1e-9, lambda who, many: seeded(random.key(who), many))
    up = layout.opened(released, CLIENTS, spread, singles)
    assert torch.equal(up["pool"].rows.weight, (held > 0).float())
    assert torch.allclose(up["pool"].rows.total, value * (held > 0)[..., None], atol=1e-4)
    assert torch.allclose(up["other"].value, torch.ones(2, 1), atol=1e-4)


@pytest.mark.parametrize(
    ("up", "words", "said"),
    [
        ({"p": Each(Mean(torch.zeros(2, 1), torch.zeros(2)))}, {"where": "server"}, "sends values client by client"),
        ({"p": Each(Mean(torch.zeros(2, 1), torch.zeros(2)))}, {"where": "client", "unit": "sample"}, "by client"),
        ({"p": Each(torch.zeros(2))}, {"where": "client"}, "can only noise means"),
        ({"p": torch.zeros(2)}, {}, "can only noise means"),
        ({"m": Mean({"buffers": {"b.running_var": torch.ones(2)}, "params": {}}, torch.tensor(1.0))}, {}, "BatchNorm"),
        ({"m": Mean({"w": torch.ones(2)}, torch.tensor(1.0))}, {"unit": "sample"}, "nothing that could be noised"),
    ],
)  # fmt: skip
def test_uploads_that_cannot_be_noised_are_refused(up: Tree, words: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Layout(privacy(**words), up)


def test_with_unit_sample_models_stay_at_home_and_a_sample_has_one_row() -> None:
    rows, model = uploads(3)
    layout = Layout(privacy(unit="sample", clip=1.0), blank(model))
    assert (layout.values, layout.rows, layout.most) == (CLASSES * WIDTH, CLASSES, 1)
    one = torch.eye(CLASSES)[:CLIENTS]
    samples = Mean(torch.ones(CLASSES, CLASSES, WIDTH) * one[..., None], one)
    vectors, _ = layout.vectors({"model": rows["model"], "prototypes": samples})
    assert torch.linalg.vector_norm(vectors, dim=1).tolist() == pytest.approx([1.0] * CLASSES)
    up = layout.opened(vectors.sum(0), 1, 0.0)
    assert up["prototypes"].weight.tolist() == pytest.approx([1.0] * CLASSES)
    assert float(up["model"].weight) == 0
    assert not up["model"].total["w"].any()


def test_a_method_that_sends_only_which_classes_it_has() -> None:
    layout = Layout(privacy(clip=2.0), {"holders": Mean(torch.zeros(CLASSES, 0), torch.zeros(CLASSES))})
    vectors, _ = layout.vectors({"holders": Mean(torch.zeros(2, CLASSES, 0), torch.ones(2, CLASSES))})
    assert torch.linalg.vector_norm(vectors, dim=1).tolist() == pytest.approx([2.0, 2.0])
    assert layout.opened(vectors.sum(0), 2, 0.0)["holders"].weight.tolist() == pytest.approx([2.0] * CLASSES)


def test_the_signal_to_noise_is_estimated_from_what_is_released() -> None:
    signal = torch.ones(2000, dtype=torch.float64) * 3
    noised = signal + 2 * seeded(random.key(1), 2000)
    assert signal_to_noise(noised, 2.0) == pytest.approx(1.5, rel=0.1)
    assert signal_to_noise(2 * seeded(random.key(1), 2000), 2.0) < 0.3
