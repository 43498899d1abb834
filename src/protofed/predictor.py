"""Classify with an exported model: by class, with distances, a confidence, and "unknown" when nothing is near."""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protofed.errors import UserError

Outputs = list[np.ndarray]  # embedding (B, D), scores (B, C), and distances (B, C) where there are prototypes
CHUNK = 256
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Prediction:
    """One sample's answer."""

    answer: str
    """The class's name, or "unknown"."""
    label: str
    """The likeliest class, whether or not it is near."""
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
        """`by` "head" or "proto", `among` "all" or "own" classes, unknown beyond which distance: else as exported."""
        path = Path(source)
        folder = path if path.is_dir() else path.parent
        self.about = _about(folder, source)
        self.by = by or self.about["inference"]
        self.among = among or self.about["candidates"]
        if self.by not in ("head", "proto") or self.among not in ("all", "own"):
            raise UserError(f"by = {self.by!r}, among = {self.among!r} should be head or proto, and all or own.")
        self.has_prototypes = "distances" in self.about["outputs"]
        if not self.has_prototypes and (self.by == "proto" or unknown_above is not None):
            raise UserError(f"{source} has no prototypes ({self.about['method']}): it classifies by head only.")
        told = self.about["unknown"]
        self.unknown_above = unknown_above if unknown_above is not None else told and told["above"]
        self.class_names: list[str] = self.about["class_names"]
        self.shape = tuple(self.about["input"]["shape"])
        self._run = (
            _session(path) if path.suffix == ".onnx" else _program(path / "model.pt2" if path.is_dir() else path)
        )

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
        """Of samples that are checked already."""
        found: list[Prediction] = []
        for start in range(0, len(array), CHUNK):
            found += self._answers(*self._run(array[start : start + CHUNK]))
        return found

    def outputs(self, x: Any) -> Outputs:
        """What the model itself gives for raw samples (B, ...)."""
        array = self.checked(x)
        parts = [self._run(array[start : start + CHUNK]) for start in range(0, len(array), CHUNK)]
        return [np.concatenate(column) for column in zip(*parts, strict=True)]

    def checked(self, x: Any) -> np.ndarray:
        """Raw samples as the model takes them; a UserError where they are not such."""
        array, inputs = np.asarray(x), self.about["input"]
        if array.shape[1:] != self.shape or not len(array):
            raise UserError(f"inputs have shape {array.shape}, but the model takes (any number, {_row(self.shape)}).")
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
        if not np.isfinite(array).all():
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


def _about(folder: Path, source: str | Path) -> dict[str, Any]:
    path = folder / "about.json"
    if not Path(source).exists():
        raise UserError(f"there is no exported model {source}. Make one with protofed export.")
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return about | {key: about[key] for key in ("input", "outputs", "class_names", "temperature", "unknown")}
    except FileNotFoundError:
        raise UserError(f"{source} is no exported model: there is no {path}. Make one with protofed export.") from None
    except (ValueError, KeyError) as error:
        raise UserError(f"{path} is damaged ({error}). Export the model anew.") from None


def _program(path: Path) -> Callable[[np.ndarray], Outputs]:
    if not path.is_file() or path.suffix != ".pt2":
        raise UserError(f"{path} is no exported model. Name the folder, its model.pt2 or its model.onnx.")
    try:
        module = torch.export.load(path).module()
    except Exception as error:  # zip, json and torch each raise their own on a damaged file; the remedy is one
        raise UserError(f"{path} cannot be read ({type(error).__name__}). Export the model anew.") from error

    def run(x: np.ndarray) -> Outputs:
        with torch.no_grad():
            return [part.numpy() for part in module(torch.from_numpy(x))]

    return run


def _session(path: Path) -> Callable[[np.ndarray], Outputs]:
    if importlib.util.find_spec("onnxruntime") is None:
        raise UserError(f"{path.name} needs onnxruntime: pip install 'protofed[export]', or name the folder.")
    import onnxruntime

    if not path.is_file():
        raise UserError(f"there is no {path}. Export the model with onnx, or name the folder.")
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's own errors have no common class
        raise UserError(f"{path} cannot be read ({type(error).__name__}). Export the model anew.") from error
    return lambda x: session.run(None, {"x": x})


def _softmax(scores: np.ndarray) -> np.ndarray:
    shifted = np.exp(scores - scores.max(1, keepdims=True))
    shares: np.ndarray = shifted / shifted.sum(1, keepdims=True)
    return shares


def _row(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))
