"""TensorBoard: event files in the run's folder. Look at them with `tensorboard --logdir runs`."""

import time
from typing import Any

from protofed.tracking.sinks.sink import RunInfo, Sink, as_overrides


class TensorBoard(Sink):
    needs = ("tensorboard",)

    def open(self, about: RunInfo) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.writer: Any = EventFileWriter(str(about.folder / "tensorboard"))
        if not about.resumed:
            self._write(0, [_text("experiment", as_overrides(about.settings))])

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self._write(step, [{"tag": name, "simple_value": number} for name, number in numbers.items()])

    def _write(self, step: int, values: list[dict[str, Any]]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(**value) for value in values])
        self.writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self.writer.flush()  # a run that is killed has said all it had

    def close(self, finished: bool) -> None:
        self.writer.close()


def _text(tag: str, settings: dict[str, str]) -> dict[str, Any]:
    """A table in the text tab."""
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.plugins.text.metadata import create_summary_metadata

    rows = ["| key | value |", "|---|---|", *(f"| `{key}` | {value} |" for key, value in settings.items())]
    tensor = TensorProto(dtype="DT_STRING", string_val=["\n".join(rows).encode()])
    return {"tag": tag, "metadata": create_summary_metadata(display_name=tag, description=""), "tensor": tensor}
