"""Sinks that people already use. Light: the process beside a run imports this and nothing else of protofed."""

from protofed.tracking.sinks.mlflow import MLflow
from protofed.tracking.sinks.sink import Sink
from protofed.tracking.sinks.tensorboard import TensorBoard
from protofed.tracking.sinks.wandb import WandB

SINKS: dict[str, type[Sink]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
