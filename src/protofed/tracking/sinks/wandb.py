"""Weights & Biases: offline unless WANDB_MODE says otherwise. `wandb sync RUN/track/wandb/offline-run-*` uploads it."""

import os
from typing import Any

from protofed.tracking.sinks.sink import RunInfo, Sink


class WandB(Sink):
    needs = ("wandb",)

    def open(self, about: RunInfo) -> None:
        mode: Any = os.environ.get("WANDB_MODE") or "offline"
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # else a failure in wandb is sent to its makers
        import wandb

        wandb.setup(wandb.Settings(silent=True))  # silent: nothing is printed, and nobody is asked for a key
        self.run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "protofed",
            group=os.environ.get("WANDB_RUN_GROUP") or about.group,
            name=os.environ.get("WANDB_NAME") or about.name,
            id=about.id,
            dir=os.environ.get("WANDB_DIR") or str(about.folder),
            mode=mode,
            config=about.settings,
            resume="allow" if about.resumed else None,
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", save_code=False),
        )

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self.run.log(numbers, step=step, commit=True)

    def final(self, step: int, numbers: dict[str, float]) -> None:
        self.run.summary.update(numbers)  # a step that was logged cannot be logged again

    def close(self, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)
