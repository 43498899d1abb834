"""Samples that differ by client: noise, rotation, blur, wrong labels. And classes of very different sizes."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.data import Skew
from protofed.data.batches import Federation, Samples
from protofed.data.domain import Domain
from protofed.errors import UserError
from protofed.ops import random

AT_ONCE = 1024  # samples that are changed at a time
FIXED = 0  # which samples a long tail keeps is the same for every seed
FEATURES = ("noise", "rotation", "blur")


def long_tailed(domain: Domain, imbalance: float) -> Domain:
    """Keep fewer training samples of each class than of the one before, so that the first has `imbalance` times as many
    as the last."""
    have = np.bincount(domain.y_train, minlength=domain.classes)
    share = np.arange(domain.classes) / max(1, domain.classes - 1)
    kept = np.minimum(have, np.maximum(1, np.rint(have.max() * imbalance**-share))).astype(np.int64)
    order = np.random.default_rng(FIXED).permutation(len(domain.y_train))
    place = np.empty(len(order), np.int64)  # of each sample among those of its class, in that order
    for label in range(domain.classes):
        mine = order[domain.y_train[order] == label]
        place[mine] = np.arange(len(mine))
    rows = np.flatnonzero(place < kept[domain.y_train])
    ids = {name: (train[rows], test) for name, (train, test) in domain.ids.items()}
    return replace(domain, x_train=domain.x_train[rows], y_train=domain.y_train[rows], ids=ids)


def fewer(domain: Domain, train: int, test: int) -> Domain:
    """So many training and test samples, of every class the same share; 0: all of them."""
    mine, theirs = _share(domain.y_train, train), _share(domain.y_test, test)
    ids = {name: (of_train[mine], of_test[theirs]) for name, (of_train, of_test) in domain.ids.items()}
    x_train, y_train, x_test, y_test = domain.x_train, domain.y_train, domain.x_test, domain.y_test
    parts = {"x_train": x_train[mine], "y_train": y_train[mine], "x_test": x_test[theirs], "y_test": y_test[theirs]}
    return replace(domain, **parts, ids=ids)


def _share(y: np.ndarray, many: int) -> np.ndarray:
    """This many rows: those that come first when each class is dealt out evenly from first to last."""
    if not 0 < many < len(y):
        return np.arange(len(y))
    order = np.random.default_rng(FIXED).permutation(len(y))
    when = np.empty(len(y))
    for label in np.unique(y):
        mine = order[y[order] == label]
        when[mine] = (np.arange(len(mine)) + 0.5) / len(mine)
    return np.sort(order[np.argsort(when[order], kind="stable")[:many]])


def strength(values: Sequence[float], rising: bool, client: int, clients: int) -> float:
    """How strongly a client's samples are changed."""
    if not values:
        return 0.0
    return values[0] * (client + 1) / clients if rising else values[client % len(values)]


def check_skew(skew: Skew, federation: Federation, frozen: bool, held_out: int) -> None:
    """Refuse a change that these samples do not allow."""
    if skew.deal == "rising" and (many := [key for key in (*FEATURES, "labels") if len(getattr(skew, key)) > 1]):
        raise UserError(
            f"skew.{many[0]} = {getattr(skew, many[0])}: with skew.deal = 'rising' it is one number, that of the last "
            "client. Give one, or use skew.deal = 'turns'."
        )
    features = [key for key in FEATURES if getattr(skew, key)]
    if held_out:
        raise UserError(
            f"held_out_clients = {held_out}: newcomers' samples are not changed by [skew]. Leave one of the two out."
        )
    if features and frozen:
        raise UserError(
            f"skew.{features[0]} changes inputs, and clients of a frozen encoder train on embeddings. Use a model that "
            "is trained, or skew.labels alone."
        )
    for domain, shape in enumerate(federation.shapes):
        if features and not federation.train_part(domain).x.is_floating_point():
            raise UserError(f"skew.{features[0]} needs samples of real numbers, and these are tokens. Leave it out.")
        if (skew.rotation or skew.blur) and len(shape) != 3:
            key = "rotation" if skew.rotation else "blur"
            raise UserError(f"skew.{key} is for images, but the samples have shape {shape}. Leave it out.")


def skewed(federation: Federation, skew: Skew) -> None:
    """Change all clients' own training, test and validation samples; everybody's test set stays as it is."""
    trains: dict[int, Samples] = {}
    tests: dict[str, dict[int, Samples]] = {"own": {}, "validation": {}}
    for client in range(federation.clients):
        wrong = strength(skew.labels, skew.deal == "rising", client, federation.clients)
        x, y = _changed(federation, skew, client, "train", federation.train(client))
        trains[client] = Samples(x, _mislabelled(y, wrong, federation, client))
        for on, found in tests.items():
            found[client] = _changed(federation, skew, client, on, federation.test(client, on))
    federation.replace_train(trains)
    for on, found in tests.items() if any(getattr(skew, key) for key in FEATURES) else ():
        federation.replace_tests(on, found)


def _changed(federation: Federation, skew: Skew, client: int, part: str, samples: Samples) -> Samples:
    """Some of a client's samples, rotated, blurred and then made noisy with the client's settings."""
    noise, turn, blur = (
        strength(getattr(skew, key), skew.deal == "rising", client, federation.clients) for key in FEATURES
    )
    if not len(samples.y) or not (noise or turn or blur):
        return samples
    black = federation.black(federation.domain(client))
    x = torch.cat([blurred(turned(some, turn, black), blur) for some in torch.split(samples.x, AT_ONCE)])
    return Samples(_noised(x, noise, random.key(federation.seed, "feature noise", part, client)), samples.y)


def turned(x: Tensor, degrees: float, black: Tensor) -> Tensor:
    """Images (N, C, H, W) rotated counter-clockwise about their centre; what comes in from outside is `black`."""
    degrees %= 360
    if not degrees:
        return x
    if degrees % 90 == 0 and x.shape[2] == x.shape[3]:
        return torch.rot90(x, int(degrees // 90), (2, 3))
    high, wide = x.shape[2:]
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    # From the place of a pixel in the result, in -1..1 each way, to where it comes from.
    matrix = torch.tensor([[cos, -sin * high / wide, 0.0], [sin * wide / high, cos, 0.0]], dtype=x.dtype)
    grid = F.affine_grid(matrix.to(x.device)[None], [1, 1, high, wide], align_corners=False)
    moved = F.grid_sample(x - black, grid.expand(len(x), -1, -1, -1), mode="bilinear", align_corners=False)
    return moved + black


def blurred(x: Tensor, sigma: float) -> Tensor:
    """Images (N, C, H, W) smoothed by a Gaussian with this deviation in pixels; edge pixels are repeated outwards."""
    if not sigma:
        return x
    radius = math.ceil(3 * sigma)
    weights = torch.exp(-0.5 * (torch.arange(-radius, radius + 1, dtype=torch.float64) / sigma) ** 2)
    kernel = (weights / weights.sum()).to(x)
    channels = x.shape[1]
    padded = F.pad(x, (radius,) * 4, mode="replicate")
    across = F.conv2d(padded, kernel.reshape(1, 1, 1, -1).expand(channels, -1, -1, -1), groups=channels)
    return F.conv2d(across, kernel.reshape(1, 1, -1, 1).expand(channels, -1, -1, -1), groups=channels)


def _noised(x: Tensor, deviation: float, key: Tensor) -> Tensor:
    """Inputs (N, ...) with Gaussian noise, in parts of bounded size."""
    if not deviation:
        return x
    parts = []
    for number, some in enumerate(torch.split(x, AT_ONCE)):
        drawn = random.normal(random.fold(key, number).to(x.device), some.numel()).reshape(some.shape)
        parts.append(some + deviation * drawn.to(some.dtype))
    return torch.cat(parts)


def _mislabelled(y: Tensor, share: float, federation: Federation, client: int) -> Tensor:
    """Labels of which this share, rounded to whole samples, is replaced by another class; all other classes are equally
    likely."""
    wrong = round(share * len(y))
    if not wrong:
        return y
    key = random.key(federation.seed, "label noise", client).to(y.device)
    rows = random.permutation(key, len(y))[:wrong]
    other = federation.classes - 1
    shift = 1 + (random.uniform(random.fold(key, 1), wrong) * other).long().clamp(max=other - 1)
    changed = y.clone()
    changed[rows] = (y[rows] + shift) % federation.classes
    return changed
