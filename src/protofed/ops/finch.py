"""FINCH: clusters of points that are linked by their first neighbours, without a parameter to choose.

Efficient Parameter-free Clustering Using First Neighbor Relations
    Sarfraz et al., CVPR 2019. https://arxiv.org/abs/1902.11266
"""

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from protofed.method import Mean


def finch(points: np.ndarray) -> np.ndarray:
    """A cluster number for each point (N, D), by cosine: the coarsest partition that has more than one cluster.

    If the first neighbours link all points at once, that is one cluster.
    """
    labels = _linked(points)
    while True:
        means = np.stack([points[labels == number].mean(0) for number in range(labels.max() + 1)])
        coarser = _linked(means)[labels]
        if coarser.max() in (0, labels.max()):
            return labels
        labels = coarser


def _linked(points: np.ndarray) -> np.ndarray:
    """The connected parts of the graph in which each point is linked to its first neighbour."""
    if len(points) < 2:
        return np.zeros(len(points), np.int64)
    unit = points / np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, -np.inf)
    links = coo_matrix((np.ones(len(points)), (np.arange(len(points)), cosines.argmax(1))), shape=cosines.shape)
    found: np.ndarray = connected_components(links, directed=False)[1].astype(np.int64)
    return found


def clusters_of(rows: Mean, cohort: Tensor) -> Mean:
    """The means (C, K, D) of the clusters of the clients' prototypes, class by class.

    Clients send one of a class (S, C, D) or several (S, C, M, D), so K = max(S * M // 2, 1). Clusters are in the order
    of their first client's number, whatever the order of the rows.
    """
    order = cohort.argsort().to(rows.weight.device)
    values, there = rows.value[order].double().cpu().numpy(), (rows.weight[order] > 0).cpu().numpy()
    if values.ndim == 4:
        values = values.transpose(0, 2, 1, 3).reshape(-1, values.shape[1], values.shape[3])
        there = there.transpose(0, 2, 1).reshape(-1, there.shape[1])
    points, classes, dim = values.shape
    made = np.zeros((classes, max(points // 2, 1), dim))
    held = np.zeros(made.shape[:2])
    for label in range(classes):
        for place, mean in enumerate(_means(values[there[:, label], label])):
            made[label, place], held[label, place] = mean, 1
    return Mean(*(torch.from_numpy(part).to(rows.total) for part in (made, held)))


def clusters_of_samples(z: Tensor, y: Tensor, mask: Tensor, classes: int, most: int) -> Mean:
    """The means (C, K, D) of the `most` largest clusters of each class's embeddings (N, D); weight 1 if there."""
    made, held = z.new_zeros(classes, most, z.shape[1]), z.new_zeros(classes, most)
    for label in torch.unique(y[mask > 0]).tolist():
        points = z[(y == label) & (mask > 0)].double().cpu().numpy()
        for place, mean in enumerate(_means(points, by_size=True)[:most]):
            made[label, place], held[label, place] = torch.from_numpy(mean).to(z), 1
    return Mean(made, held)


def _means(points: np.ndarray, by_size: bool = False) -> list[np.ndarray]:
    """The means of the clusters, in the order of their first points, or the largest first."""
    if not len(points):
        return []
    groups = finch(points)
    found = [groups == number for number in range(groups.max() + 1)]
    ordered = sorted(found, key=lambda members: (-int(members.sum()) if by_size else 0, int(members.argmax())))
    return [points[members].mean(0) for members in ordered]
