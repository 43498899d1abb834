"""What a data set is here: two pairs of arrays, the names of its classes, and who each sample came from."""

from dataclasses import dataclass, field, replace

import numpy as np


@dataclass(frozen=True)
class Domain:
    """One data set. Images are (N, channels, height, width), anything else (N, ...); labels are 0 .. classes-1."""

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    class_names: tuple[str, ...]
    ids: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    """Natural owners: a column name to one id per train sample and one per test sample."""
    scale: tuple[np.ndarray, np.ndarray] | None = None
    """Mean and deviation to normalise by, where the data is a part of something larger; else its own are taken."""

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x_train.shape[1:])

    def as_numbers(self) -> "Domain":
        """Whole numbers (tokens) as float32; pixels and floats as they are."""
        if self.x_train.dtype.kind not in "iu" or self.x_train.dtype == np.uint8:
            return self
        return replace(self, x_train=self.x_train.astype(np.float32), x_test=self.x_test.astype(np.float32))
