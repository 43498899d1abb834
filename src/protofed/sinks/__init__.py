"""Sinks that people already use. Light: the process beside a run imports this and nothing else of protofed."""

from protofed.sinks.mlflow import MLflow
from protofed.sinks.sink import Sink
from protofed.sinks.tensorboard import TensorBoard
from protofed.sinks.wandb import WandB

SINKS: dict[str, type[Sink]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
