"""How raw samples become what a model sees."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protofed.data.domain import Domain
from protofed.errors import UserError


@dataclass(frozen=True, eq=False)
class Scaler:
    """Pixels become numbers around zero: by the training set's own mean and deviation, by one half, or not at all."""

    unit: float
    """255 for uint8, else 1; what is not whole is divided by it first."""
    mean: np.ndarray
    std: np.ndarray
    """(1, channels or features, 1, ...), or of one number."""
    whole: bool = False
    """Tokens: they stay what they are."""

    @classmethod
    def of(cls, domain: Domain, normalize: str) -> "Scaler":
        """As `data.normalize` says, by a domain's training part."""
        sample = domain.x_train
        whole = bool(np.issubdtype(sample.dtype, np.integer) and sample.dtype != np.uint8)
        unit = 255.0 if sample.dtype == np.uint8 else 1.0
        mean, std = np.zeros(1, np.float32), np.ones(1, np.float32)
        if not whole and normalize == "half":
            mean = std = np.full(1, 0.5, np.float32)
            if len(sample) and (sample.min() < 0 or sample.max() > unit):
                raise UserError(
                    f"data.normalize = 'half' is for pixels, but {domain.name} has values from {sample.min()} to "
                    f"{sample.max()}. Use data.normalize = 'auto'."
                )
        elif not whole and normalize == "auto" and domain.scale is not None:
            mean, std = domain.scale
        elif not whole and normalize == "auto" and len(sample):
            axes = (0, *range(2, sample.ndim))  # one pair per channel, or per feature
            shape = (1, -1, *[1] * (sample.ndim - 2))
            spread = (sample.std(axis=axes, dtype=np.float64) / unit).reshape(shape)
            mean = (sample.mean(axis=axes, dtype=np.float64) / unit).reshape(shape).astype(np.float32)
            std = np.where(spread > 1e-6, spread, 1).astype(np.float32)
        return cls(unit, mean, std, whole)

    def __call__(self, x: np.ndarray) -> Tensor:
        if self.whole:
            return torch.from_numpy(x.astype(np.int64))
        return torch.from_numpy((x.astype(np.float32) / self.unit - self.mean) / self.std)


def inputs(domains: Sequence[Domain], normalize: str) -> dict[str, Any]:
    """What whoever joins later must know, ready for JSON; no sample is in it."""
    names = list(domains[0].class_names)
    return {"class_names": names, "domains": [describe(domain, normalize) for domain in domains]}


def describe(domain: Domain, normalize: str, scale: Scaler | None = None) -> dict[str, Any]:
    """The inputs of one domain, and how they are scaled."""
    scale = scale or Scaler.of(domain, normalize)
    return {
        "name": domain.name,
        "shape": list(domain.shape),
        "dtype": str(domain.x_train.dtype),
        "range": [float(domain.x_train.min()), float(domain.x_train.max())],
        "unit": scale.unit,
        "whole": scale.whole,
        "mean": scale.mean.flatten().tolist(),
        "std": scale.std.flatten().tolist(),
    }


def described(told: dict[str, Any]) -> Scaler:
    """The scaler that `describe` told of."""
    shape = [1] if len(told["mean"]) == 1 else [1, -1, *[1] * (len(told["shape"]) - 1)]
    mean, std = (np.array(told[key], np.float32).reshape(shape) for key in ("mean", "std"))
    return Scaler(float(told["unit"]), mean, std, bool(told["whole"]))
