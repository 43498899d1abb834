"""Several centres per class: k-means in fixed shapes, so that it also runs stacked, and DBSCAN on the host."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.method import Mean
from protofed.ops import random


def kmeans(z: Tensor, y: Tensor, mask: Tensor, classes: int, clusters: int, key: Tensor, steps: int) -> Mean:
    """Centres (C, K, D) of each class, started from K random samples of it; weight 1 where a centre exists.

    A class with fewer than K samples has as many centres as samples; a cluster that loses its samples keeps its centre.
    """
    first = _first_of_class(y, mask, classes, clusters, key)  # (N, C, K), at most one sample per centre
    there = first.sum(0)
    centres = torch.einsum("nck,nd->ckd", first, z)
    inside = F.one_hot(y, classes).to(z.dtype) * mask[:, None]
    for _ in range(steps):
        distance = ((z[:, None] - centres[y]) ** 2).sum(-1).masked_fill(there[y] == 0, torch.inf)  # (N, K)
        nearest = F.one_hot(distance.argmin(1), clusters).to(z.dtype)
        belongs = inside[:, :, None] * nearest[:, None]  # (N, C, K)
        centres = Mean(torch.einsum("nck,nd->ckd", belongs, z), belongs.sum(0)).otherwise(centres)
    return Mean(centres * there[..., None], there)


def _first_of_class(y: Tensor, mask: Tensor, classes: int, clusters: int, key: Tensor) -> Tensor:
    """One-hot (N, C, K): the first K samples of each class in a random order."""
    rank = random.ranks(key, y, mask > 0)
    slot = torch.where((mask > 0) & (rank < clusters), y * clusters + rank, classes * clusters)
    return F.one_hot(slot, classes * clusters + 1)[:, :-1].reshape(len(y), classes, clusters).to(mask.dtype)


def dbscan(z: Tensor, y: Tensor, mask: Tensor, classes: int, most: int, eps: float, min_samples: int) -> Mean:
    """Means (C, K, D) of the K largest DBSCAN clusters of each class; weight 1 where a cluster exists.

    Noise points belong to no cluster. A class that is all noise has one centre, the mean of all its samples. With
    eps = 0 every class has its own: the 0.9 quantile of the distances to the min_samples-th nearest sample.
    """
    centres, there = z.new_zeros(classes, most, z.shape[1]), z.new_zeros(classes, most)
    for number in torch.unique(y[mask > 0]).tolist():
        rows = z[(y == number) & (mask > 0)]
        found = _clusters(rows.detach().double().cpu().numpy(), eps, min_samples)
        means = [rows[torch.from_numpy(members).to(z.device)].mean(0) for members in found[:most]]
        centres[number, : len(means)] = torch.stack(means)
        there[number, : len(means)] = 1
    return Mean(centres, there)


def _clusters(rows: np.ndarray, eps: float, min_samples: int) -> list[np.ndarray]:
    """The rows of each cluster, largest cluster first."""
    from sklearn.cluster import DBSCAN  # a library that takes a second to load
    from sklearn.neighbors import NearestNeighbors

    everyone = np.ones(len(rows), bool)
    if len(rows) < min_samples:
        return [everyone]
    if not eps:
        neighbours = NearestNeighbors(n_neighbors=min_samples).fit(rows).kneighbors(rows)[0]
        eps = float(np.quantile(neighbours[:, -1], 0.9)) or 1e-12  # identical samples form one cluster
    label = DBSCAN(eps=eps, min_samples=min_samples).fit_predict(rows)
    found = [label == number for number in range(label.max() + 1)]
    return sorted(found, key=lambda members: -members.sum()) or [everyone]
