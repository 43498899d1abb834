"""Synthetic features in place of data: for each class, a linear head has the same gradients on both.

A linear head is {"weight": (C, D)}, with "bias": (C,) if it has one. The gradient of cross-entropy by its logits
is softmax - onehot, so only `match` needs automatic differentiation.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.errors import UserError
from protofed.method import Batch, Mean, Params, Spec
from protofed.ops import random
from protofed.ops.derivatives import grad
from protofed.ops.replay import captured
from protofed.ops.trees import under


def drawn(batches: Sequence[Batch], n: int, times: int, key: Tensor) -> list[Batch]:
    """The batches, with masks that count how often several draws of n random samples per class took each sample.

    A draw is without replacement: a class with fewer than n samples is drawn whole.
    """
    y, mask = torch.cat([b.y for b in batches]), torch.cat([b.mask for b in batches])
    keys = random.fold(key, torch.arange(times, device=key.device)[:, None])
    chosen = (random.ranks(keys, y, mask > 0) < n).sum(0) * (mask > 0)
    parts = torch.split(chosen.to(mask.dtype), [len(b.y) for b in batches])
    return [b._replace(mask=part) for b, part in zip(batches, parts, strict=True)]


def last_part(name: str) -> str:
    """The last part of a parameter's name: weight or bias, whatever the layer is called."""
    return name.rsplit(".", 1)[-1]


def linear(params: Params) -> Params:
    """A model's head, {"head.fc.weight": ...}, as a linear head."""
    return {last_part(name): value for name, value in params.items()}


def linear_heads(method: str, specs: Sequence[Spec]) -> None:
    """Check that the head of every model is one linear layer, with or without a bias."""
    for spec in specs:
        found = {name: tuple(t.shape) for name, t in under(spec.params | spec.buffers, "head.").items()}
        weight, bias = ("weight", (spec.classes, spec.dim)), ("bias", (spec.classes,))
        if sorted((last_part(name), shape) for name, shape in found.items()) not in ([weight], [bias, weight]):
            listed = ", ".join(f"{name} {shape}" for name, shape in found.items()) or "no parameters"
            raise UserError(
                f"method.name = {method!r} retrains a head of one linear layer, but the head of {spec.architecture} "
                f"has {listed}. Use a model whose head is one linear layer, such as cnn_mnist."
            )


def logits(head: Params, z: Tensor) -> Tensor:
    return F.linear(z, head["weight"], head.get("bias"))


def class_gradients(head: Params, z: Tensor, batch: Batch) -> Mean:
    """Sums over each class's samples of the head's gradients, weight (C, C, D) and bias (C, C), and counts (C,)."""
    onehot = (batch.y[:, None] == torch.arange(len(head["weight"]), device=z.device)).to(z.dtype)
    error = logits(head, z).softmax(1) - onehot
    own = onehot * batch.mask[:, None]
    sums = {"weight": torch.einsum("bc,bk,bd->ckd", own, error, z), "bias": own.T @ error}
    return Mean({name: sums[name] for name in head}, own.sum(0))


def feature_gradients(head: Params, features: Tensor) -> Params:
    """The same for features (C, n, D), n per class, as means instead of sums."""
    onehot = torch.eye(len(features), dtype=features.dtype, device=features.device)
    error = logits(head, features).softmax(-1) - onehot[:, None]
    means = {"weight": error.mT @ features / features.shape[1], "bias": error.mean(1)}
    return {name: means[name] for name in head}


def mismatch(features: Tensor, head: Params, real: Mean) -> Tensor:
    """Sum of 1 - cosine of the gradients' rows (the bias is one row), over the classes that have real gradients."""
    made, wanted = feature_gradients(head, features), real.value
    by_class = (1 - _cosine(made["weight"], wanted["weight"])).sum(1)
    if "bias" in head:
        by_class = by_class + 1 - _cosine(made["bias"], wanted["bias"])
    return (by_class * (real.weight > 0)).sum()


def _cosine(left: Tensor, right: Tensor) -> Tensor:
    """Cosine along the last axis; tends to 0 as the lengths do (1e-6, as in CReFF's code)."""
    lengths: Tensor = left.norm(dim=-1) * right.norm(dim=-1)
    return (left * right).sum(-1) / (lengths + 1e-6)


def match(features: Tensor, head: Params, real: Mean, steps: int, lr: float) -> Tensor:
    """The features after some gradient steps on the mismatch; a class without real gradients keeps its features."""
    for _ in range(steps):
        features = features - lr * grad(mismatch)(features, head, real)
    return features


def retrain(
    features: Tensor,
    bias: bool,
    epochs: int,
    batch_size: int,
    lr: float,
    key: Tensor,
    start: Params | None = None,
    labels: Tensor | None = None,
) -> Params:
    """A linear head, from scratch or from one that there is: softmax regression on features (C, n, D) by SGD;
    batch_size 0 takes all at once. With `labels` (M,), features (M, n, D) are of these classes; `start` has all."""
    classes, n, dim = features.shape
    z = features.flatten(0, 1)
    if bias:
        z = F.pad(z, (0, 1), value=1.0)  # a bias is the weight of a feature that is always 1
    if start is not None:
        classes = len(start["weight"])
        head = torch.cat([start["weight"], start["bias"][:, None]], 1) if bias else start["weight"]
    else:
        drawn = random.uniform(key, classes * z.shape[1]).to(z.dtype).reshape(classes, -1)
        head = (2 * drawn - 1) / dim**0.5  # as torch initialises a linear layer
    eye = torch.eye(classes, dtype=z.dtype, device=z.device)
    onehot = (eye if labels is None else eye[labels]).repeat_interleave(n, 0)

    def one(head: Tensor, z: Tensor, onehot: Tensor) -> Tensor:
        for x, y in zip(torch.split(z, batch_size or len(z)), torch.split(onehot, batch_size or len(z)), strict=True):
            error = (x @ head.T).softmax(1) - y
            head = torch.addmm(head, error.T, x, alpha=-lr / len(x))
        return head

    epoch = captured(one, head, z, onehot) if epochs else one
    for number in range(epochs):
        order = random.permutation(random.fold(key, number), len(z))
        head = epoch(head, z[order], onehot[order])
    return {"weight": head[:, :dim]} | ({"bias": head[:, dim]} if bias else {})
