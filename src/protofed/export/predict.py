"""Classify with an exported model: by class, with distances, a confidence, and "unknown" when nothing is near."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from protofed.errors import UserError
from protofed.export import files as exported
from protofed.export.files import Outputs

CHUNK = 256
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Prediction:
    """One sample's answer."""

    answer: str
    """The class's name, or "unknown"."""
    label: str
    """The most likely class, whether or not it is near."""
    number: int
    """Its number."""
    confidence: float
    """How likely it is among the candidates, if it is one of them."""
    distance: float | None
    """To the nearest prototype of any candidate; None without prototypes."""
    distances: dict[str, float]
    """To every class that has a prototype."""
    scores: dict[str, float]
    """By the classifier."""

    @property
    def unknown(self) -> bool:
        return self.answer == UNKNOWN


class Predictor:
    """An exported folder, or one of its two models: `predictor(x)` takes one raw sample or a batch of them."""

    def __init__(
        self,
        source: str | Path,
        *,
        by: str | None = None,
        among: str | None = None,
        unknown_above: float | None = None,
    ) -> None:
        """`by` "head" or "proto", `among` "all" or "own" classes, unknown beyond this distance: by default as
        exported."""
        path = Path(source)
        folder = path if path.is_dir() else path.parent
        self.about = exported.read_about(folder, source)
        self.by = by or self.about["inference"]
        self.among = among or self.about["candidates"]
        for key, value, known in (("by", self.by, ("head", "proto")), ("among", self.among, ("all", "own"))):
            if value not in known:
                raise UserError(f"{key} = {value!r} is unknown. Use {' or '.join(known)}.")
        self.has_prototypes = "distances" in self.about["outputs"]
        if not self.has_prototypes and (self.by == "proto" or unknown_above is not None):
            raise UserError(f"{source} has no prototypes ({self.about['method']}): it classifies by head only.")
        told = self.about["unknown"]
        self.unknown_above = unknown_above if unknown_above is not None else told and told["above"]
        self.class_names: list[str] = self.about["class_names"]
        self.shape = tuple(self.about["input"]["shape"])
        self._run = exported.model(path / "model.pt2" if path.is_dir() else path, self.about)

    def __call__(self, x: Any) -> "Prediction | list[Prediction]":
        """One sample of the input's shape gives one prediction, a batch of them a list."""
        array = np.asarray(x)
        if array.shape == self.shape:
            return self.predict(array[None])[0]
        return self.predict(array)

    def predict(self, x: Any) -> list[Prediction]:
        """Of raw samples (B, ...)."""
        return self.classify(self.checked(x))

    def classify(self, array: np.ndarray) -> list[Prediction]:
        """Predictions for samples that are already checked."""
        found: list[Prediction] = []
        for start in range(0, len(array), CHUNK):
            found += self._answers(*self._run(array[start : start + CHUNK]))
        return found

    def outputs(self, x: Any) -> Outputs:
        """The model's own outputs for raw samples (B, ...)."""
        array = self.checked(x)
        parts = [self._run(array[start : start + CHUNK]) for start in range(0, len(array), CHUNK)]
        return [np.concatenate(column) for column in zip(*parts, strict=True)]

    def checked(self, x: Any) -> np.ndarray:
        """Raw samples as the model takes them; a UserError if they do not fit."""
        array, inputs = np.asarray(x), self.about["input"]
        if array.shape[1:] != self.shape or not len(array):
            takes = ", ".join(map(str, self.shape))
            raise UserError(f"inputs have shape {array.shape}, but the model takes (any number, {takes}).")
        if array.dtype.kind not in "biuf":
            raise UserError(f"inputs are {array.dtype}, but the model takes numbers ({inputs['takes']}).")
        if inputs["takes"] == "int64":
            if array.dtype.kind == "f":
                raise UserError(f"inputs are {array.dtype}, but the model takes whole numbers. Give int64.")
            return array.astype(np.int64)
        low, high = inputs["range"]
        if inputs["dtype"] == "uint8" and array.dtype.kind == "f" and high > 1 and 0 < array.max() <= 1:
            raise UserError("inputs are between 0 and 1, but the model takes pixels from 0 to 255. Multiply by 255.")
        if inputs["dtype"] != "uint8" and array.dtype == np.uint8:
            if low < 0 or high > 1:
                raise UserError(
                    f"inputs are uint8, but the model takes numbers from {low:g} to {high:g}. Convert them."
                )
            array = array / 255
        array = array.astype(np.float32)
        if not (~np.isinf(array) if inputs.get("missing") is True else np.isfinite(array)).all():
            raise UserError("inputs hold NaN or infinite values. Remove or replace those.")
        return array

    def _answers(self, embedding: np.ndarray, scores: np.ndarray, apart: np.ndarray | None = None) -> list[Prediction]:
        allowed = np.ones(len(self.class_names), bool)
        if self.among == "own":
            allowed = np.isin(np.arange(len(allowed)), self.about["own_classes"])
        judged = scores if self.by == "head" or apart is None else -(apart**2)
        shares = _softmax(np.where(allowed, judged, -np.inf) / self.about["temperature"][self.by])
        found = []
        for row, share in enumerate(shares):
            best = int(share.argmax())
            distance = float(np.where(allowed, apart[row], np.inf).min()) if apart is not None else None
            far = distance is not None and self.unknown_above is not None and distance > self.unknown_above
            named = dict(zip(self.class_names, (apart[row].tolist() if apart is not None else []), strict=False))
            found.append(
                Prediction(
                    answer=UNKNOWN if far else self.class_names[best],
                    label=self.class_names[best],
                    number=best,
                    confidence=float(share[best]),
                    distance=distance,
                    distances={name: value for name, value in named.items() if np.isfinite(value)},
                    scores=dict(zip(self.class_names, scores[row].tolist(), strict=True)),
                )
            )
        return found


def _softmax(scores: np.ndarray) -> np.ndarray:
    shifted = np.exp(scores - scores.max(1, keepdims=True))
    shares: np.ndarray = shifted / shifted.sum(1, keepdims=True)
    return shares
