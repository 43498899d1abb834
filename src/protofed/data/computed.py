"""Data for any number of clients, computed when a client is drawn. Until then, its samples take no memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from protofed.data.domain import Domain
from protofed.errors import UserError
from protofed.importing import error_in_words
from protofed.ops import random

AT_ONCE = 2**18  # random words that are drawn at a time
WIDTH = 147.8  # standard deviation of the sum of four bytes


class CohortSamples(NamedTuple):
    """The samples of K clients: inputs (K, N, ...) and labels (K, N), for training and for tests."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


class Computed(ABC):
    """Computes a client's samples from the run's seed and the client's number: always the same ones."""

    shape: Sequence[int]
    """The shape of one sample."""
    names: Sequence[str]
    """The classes."""
    train: int
    """Training samples of every client."""
    test: int
    """Test samples of every client."""

    @abstractmethod
    def draw(self, seed: int, clients: Sequence[int]) -> CohortSamples:
        """The samples of these clients."""

    @abstractmethod
    def common(self) -> tuple[np.ndarray, np.ndarray]:
        """The samples (N, ...) and labels (N,) that a global model is tested on; there may be none."""

    @property
    @abstractmethod
    def about(self) -> str:
        """Everything that the samples depend on."""

    def domain(self, name: str) -> Domain:
        """This data as a data set without training samples."""
        x, y = self.common()
        none = np.zeros((0, *self.shape), x.dtype)
        scale = (
            np.zeros(1, np.float32),
            np.ones(1, np.float32),
        )  # pixels are treated as numbers: they were never all computed
        return Domain(name, none, np.zeros(0, np.int64), x, y, tuple(self.names), scale=scale, computed=self)


@dataclass(frozen=True)
class Gaussians(Computed):
    """Classes that are bell-shaped clouds around random points. Every client has some of them, moved by an offset of
    its own (the built-in data set `gaussians`)."""

    shape: Sequence[int] = (1, 8, 8)
    classes: int = 10
    ways: int = 3
    """Classes per client, with about equally many samples each; 0: all."""
    train: int = 20
    test: int = 10
    common_test: int = 1000
    """Samples of all classes, without any client's offset, to test a global model on."""
    apart: float = 0.3
    """Distance between the classes' points, where samples lie about 1 from their point in every direction."""
    offset: float = 0.2
    """Distance between clients."""
    names: Sequence[str] = field(init=False, default=())

    def __post_init__(self) -> None:
        wholes = {"classes": self.classes, "train": self.train, "test": self.test, "common_test": self.common_test}
        least = {"classes": 1, "train": 1, "test": 0, "common_test": 0}
        sizes = self.shape if isinstance(self.shape, list | tuple) else ()
        if not sizes or any(type(n) is not int or n < 1 for n in sizes) or np.prod(sizes) > 2**20:
            raise UserError(
                f"data.options.shape = {self.shape!r} should be a list of whole numbers, such as [1, 8, 8]."
            )
        for key, value in wholes.items():
            if type(value) is not int or not least[key] <= value <= 100_000:
                raise UserError(f"data.options.{key} = {value!r} should be a whole number from {least[key]} to 100000.")
        if type(self.ways) is not int or not 0 <= self.ways <= self.classes:
            raise UserError(f"data.options.ways = {self.ways!r}, but there are {self.classes} classes. Use 0 for all.")
        for key in ("apart", "offset"):
            value = getattr(self, key)
            if type(value) not in (int, float) or not 0 <= value <= 1000:
                raise UserError(f"data.options.{key} = {value!r} should be a number from 0 to 1000.")
        object.__setattr__(self, "shape", tuple(sizes))
        object.__setattr__(self, "names", tuple(map(str, range(self.classes))))

    @property
    def about(self) -> str:
        return repr(self)

    def _points(self) -> np.ndarray:
        """Where the classes are (C, D)."""
        wide = int(np.prod(self.shape))
        return self.apart * _bell(_words(_keys(random.words("gaussians", "points"), range(self.classes)), wide))

    def draw(self, seed: int, clients: Sequence[int]) -> CohortSamples:
        wide, many = int(np.prod(self.shape)), self.train + self.test
        x, y = np.empty((len(clients), many, wide), np.float32), np.empty((len(clients), many), np.int64)
        points, keys = self._points(), _keys(random.words("gaussians", seed), clients)
        place = np.concatenate([np.arange(self.train), np.arange(self.test)]) % (self.ways or self.classes)
        step = max(1, AT_ONCE // (many * wide))
        for some in (slice(i, i + step) for i in range(0, len(clients), step)):
            words = _words(keys[some], self.classes + wide + many * wide)
            order, own, rest = np.split(words, [self.classes, self.classes + wide], 1)
            y[some] = np.argsort(order, 1, kind="stable")[:, place]
            np.add(_bell(rest).reshape(-1, many, wide), self.offset * _bell(own)[:, None], out=x[some])
            x[some] += points[y[some]]
        x = x.reshape(*x.shape[:2], *self.shape)
        return CohortSamples(x[:, : self.train], y[:, : self.train], x[:, self.train :], y[:, self.train :])

    def common(self) -> tuple[np.ndarray, np.ndarray]:
        wide, y = int(np.prod(self.shape)), np.arange(self.common_test) % self.classes
        x = self._points()[y] + _bell(_words(_keys(random.words("gaussians", "test"), range(len(y))), wide))
        return x.reshape(-1, *self.shape), y


@dataclass(frozen=True)
class PerClient(Computed):
    """Samples from a function of your own, which is called with a seed and a client's number, and returns x (N, ...),
    y (N,), x_test and y_test. Every client has the same number of samples."""

    function: Callable[[int, int], tuple[Any, Any, Any, Any]]
    shape: Sequence[int]
    names: Sequence[str]
    train: int
    test: int
    x_common: Any = None
    y_common: Any = None
    """Samples that a global model is tested on, if there are any."""

    @property
    def about(self) -> str:
        where = f"{self.function.__module__}:{getattr(self.function, '__qualname__', type(self.function).__name__)}"
        return f"{where} {tuple(self.shape)} {tuple(self.names)} {self.train} {self.test}"

    def draw(self, seed: int, clients: Sequence[int]) -> CohortSamples:
        rows = [self._client(seed, int(client)) for client in clients]
        return CohortSamples(*(np.stack(column) for column in zip(*rows, strict=True)))

    def _client(self, seed: int, client: int) -> CohortSamples:
        """One client's samples, checked."""
        try:
            x, y, x_test, y_test = self.function(seed, client)
            parts = np.asarray(x), np.asarray(y), np.asarray(x_test), np.asarray(y_test)
        except Exception as error:
            raise UserError(f"client {client}: computing its samples raises {error_in_words(error)}.") from error
        for xs, ys, many, what in ((*parts[:2], self.train, "training"), (*parts[2:], self.test, "test")):
            if xs.shape != (many, *self.shape) or ys.shape != (many,):
                raise UserError(
                    f"client {client}: its {what} samples have shape {xs.shape} and its labels {ys.shape}, but this "
                    f"data says {(many, *self.shape)} and {(many,)}. Every client has the same number of samples."
                )
            if many and (ys.dtype.kind not in "iu" or not 0 <= ys.min() <= ys.max() < len(self.names)):
                raise UserError(f"client {client}: its labels are not whole numbers from 0 to {len(self.names) - 1}.")
            if xs.dtype.kind == "f" and not np.isfinite(xs).all():
                raise UserError(f"client {client}: its {what} samples hold NaN or infinite values.")
        return CohortSamples(*parts)

    def common(self) -> tuple[np.ndarray, np.ndarray]:
        if self.x_common is None:
            first = np.asarray(self._client(0, 0).x)
            return first[:0], np.zeros(0, np.int64)
        return np.asarray(self.x_common), np.asarray(self.y_common, np.int64)


def _keys(words: tuple[int, int], numbers: Sequence[int]) -> np.ndarray:
    """Two words (K, 2) for each of these numbers."""
    low, high = (np.uint32(word) for word in words)
    counter = np.asarray(numbers, np.uint32) * np.uint32(random.STEP)
    first = random.mix_words(random.mix_words(counter ^ low) ^ high)
    return np.stack([first, random.mix_words(random.mix_words(counter ^ high) ^ first)], 1)


def _words(keys: np.ndarray, n: int) -> np.ndarray:
    """Words (K, n) of these keys."""
    counter = np.arange(n, dtype=np.uint32) * np.uint32(random.STEP)
    return random.mix_words(random.mix_words(counter ^ keys[:, :1]) ^ keys[:, 1:])


def _bell(words: np.ndarray) -> np.ndarray:
    """Numbers of mean 0 and deviation 1 from words, nearly normal: a word's four bytes, added up."""
    pairs = (words & 0xFF00FF) + (words >> 8 & 0xFF00FF)
    return ((pairs & 0xFFFF) + (pairs >> 16)).astype(np.float32) / np.float32(WIDTH) - np.float32(510 / WIDTH)
