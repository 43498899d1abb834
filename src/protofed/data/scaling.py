"""How raw samples are scaled for a model."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protofed.data.domain import Domain, has_gaps
from protofed.errors import UserError


@dataclass(frozen=True, eq=False)
class Scaler:
    """Scales pixels to numbers around zero: by the training set's mean and deviation, by one half, or not at all."""

    unit: float
    """255 for uint8, otherwise 1; all but whole inputs are divided by it first."""
    mean: np.ndarray
    std: np.ndarray
    """(1, channels or features, 1, ...), or of one number."""
    whole: bool = False
    """Whether inputs are tokens, which are not scaled."""

    @classmethod
    def of(cls, domain: Domain, normalize: str) -> "Scaler":
        """The scaler that `data.normalize` asks for, from a domain's training part."""
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
            found = [sample.std(axis=axes, dtype=np.float64), sample.mean(axis=axes, dtype=np.float64)]
            if has_gaps(sample):  # of the values that exist; 0 if there are none
                known = np.ma.masked_invalid(sample.astype(np.float64))
                found = [known.std(axis=0).filled(0), known.mean(axis=0).filled(0)]
            spread, middle = ((number / unit).reshape(shape) for number in found)
            mean, std = middle.astype(np.float32), np.where(spread > 1e-6, spread, 1).astype(np.float32)
        return cls(unit, mean, std, whole)

    def __call__(self, x: np.ndarray) -> Tensor:
        if self.whole:
            return torch.from_numpy(x.astype(np.int64))
        return torch.from_numpy((x.astype(np.float32) / self.unit - self.mean) / self.std)


def inputs(domains: Sequence[Domain], normalize: str) -> dict[str, Any]:
    """What a client that joins later needs to know, ready for JSON. It contains no samples."""
    names = list(domains[0].class_names)
    return {"class_names": names, "domains": [describe_inputs(domain, normalize) for domain in domains]}


def describe_inputs(domain: Domain, normalize: str, scale: Scaler | None = None) -> dict[str, Any]:
    """A description of one domain's inputs and their scaling."""
    scale = scale or Scaler.of(domain, normalize)
    known = domain.x_train[~np.isnan(domain.x_train)] if has_gaps(domain.x_train) else domain.x_train
    return {
        "name": domain.name,
        "shape": list(domain.shape),
        "dtype": str(domain.x_train.dtype),
        "range": [float(known.min()), float(known.max())] if known.size else [0.0, 0.0],
        "unit": scale.unit,
        "whole": scale.whole,
        "mean": scale.mean.flatten().tolist(),
        "std": scale.std.flatten().tolist(),
        **({"missing": True} if has_gaps(domain.x_train) or has_gaps(domain.x_test) else {}),
    }


def check_inputs(told: Any) -> None:
    """Raise ValueError, KeyError or TypeError if this is not what `inputs` returns."""
    names, domains = told["class_names"], told["domains"]
    if not isinstance(domains, list) or not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise ValueError("class_names and domains are not lists")
    for one in domains:
        shape, ends = one["shape"], one["range"]
        if not isinstance(shape, list) or not shape or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"shape is {str(shape)[:40]}")
        numbers = [one["unit"], *ends, *one["mean"], *one["std"]]
        if not all(type(n) in (int, float) and abs(n) <= sys.float_info.max for n in numbers) or 0 in (
            one["unit"],
            *one["std"],
        ):
            raise ValueError("a number is not finite, or 0 where something is divided by it")
        if len(ends) != 2 or len(one["mean"]) != len(one["std"]) or len(one["mean"]) not in (1, shape[0]):
            raise ValueError("there are not as many numbers as its shape has channels")
        if not isinstance(one["dtype"], str) or type(one["whole"]) is not bool:
            raise ValueError("dtype is not a word, or whole is neither true nor false")


def described_scaler(told: dict[str, Any]) -> Scaler:
    """The scaler that `describe_inputs` described."""
    shape = [1] if len(told["mean"]) == 1 else [1, -1, *[1] * (len(told["shape"]) - 1)]
    mean, std = (np.array(told[key], np.float32).reshape(shape) for key in ("mean", "std"))
    return Scaler(float(told["unit"]), mean, std, bool(told["whole"]))
