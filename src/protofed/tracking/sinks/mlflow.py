"""MLflow: where MLFLOW_TRACKING_URI says, else MLflow's own default, a database in the current folder: `mlflow ui`."""

import contextlib
import fcntl
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protofed.tracking.sinks.sink import RunInfo, Sink, as_overrides

AT_ONCE = 100  # parameters in one request, at most
LONGEST = 500  # characters of a parameter, in every version


class MLflow(Sink):
    needs = ("mlflow", "sqlalchemy", "alembic")

    def open(self, about: RunInfo) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # else MLflow tells its makers how it is used
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # a server that is down is found out soon
        from mlflow.tracking import MlflowClient, get_tracking_uri

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.ERROR)
        with _alone(get_tracking_uri()):
            self.client: Any = MlflowClient()
            experiment = os.environ.get("MLFLOW_EXPERIMENT_ID") or self._experiment()
        found = self.client.search_runs([experiment], f"tags.protofed_id = '{about.id}'") if about.resumed else []
        if found:
            self.id = found[0].info.run_id
            self.client.update_run(self.id, "RUNNING")
        else:
            self._create(experiment, about)

    def _experiment(self) -> str:
        """The id of the experiment that the user named, or of 'protofed'."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "protofed"
        found = self.client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self.client.create_experiment(name))

    def _create(self, experiment: str, about: RunInfo) -> None:
        from mlflow.entities import Param

        tags = {"protofed_id": about.id, "group": about.group}
        self.id = self.client.create_run(experiment, run_name=about.name, tags=tags).info.run_id
        settings = [Param(key, value[:LONGEST]) for key, value in as_overrides(about.settings).items()]
        for start in range(0, len(settings), AT_ONCE):
            self.client.log_batch(self.id, params=settings[start : start + AT_ONCE])

    def log(self, step: int, numbers: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self.client.log_batch(self.id, metrics=[Metric(name, number, now, step) for name, number in numbers.items()])

    def close(self, finished: bool) -> None:
        self.client.set_terminated(self.id, "FINISHED" if finished else "KILLED")


@contextlib.contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Let one process in at a time: MLflow makes its tables on first use, and two processes doing so disturb each
    other."""
    name = f"protofed-mlflow-{os.getuid()}-{hashlib.sha256(uri.encode()).hexdigest()[:16]}.lock"
    with open(Path(tempfile.gettempdir()) / name, "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
