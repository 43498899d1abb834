"""`protofed predict`"""

import csv
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from protofed.cli.common import console, pour, say
from protofed.errors import UserError

if TYPE_CHECKING:
    from protofed.export.predict import Prediction, Predictor

SHOWN = 50  # rows of the table


def predict(
    model: Annotated[Path, typer.Argument(help="An exported folder, or its model.pt2 or model.onnx.")],
    inputs: Annotated[
        list[Path], typer.Argument(help=".npy, .npz (array x), images, or folders of images. Not scaled.")
    ],
    by: Annotated[str | None, typer.Option(help="head or proto; by default the method's own rule.")] = None,
    among: Annotated[str | None, typer.Option(help="all or own classes; by default the method's own rule.")] = None,
    unknown_above: Annotated[
        float | None,
        typer.Option(min=0.0, help="Distance beyond which the answer is 'unknown'; by default as exported."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
) -> None:
    """Classify samples with an exported model.

    It prints class, confidence and distance, and 'unknown' if no prototype is near.

    Examples:

      protofed predict client3 inputs.npz

      protofed predict client3/model.onnx photo.png --json
    """
    if as_json and as_csv:
        raise UserError("--json and --csv are two ways to write the same. Give one of them.")
    import numpy as np  # with PyTorch, which a typo should not wait for

    from protofed.data.readers.inputs import read_inputs
    from protofed.export.predict import Predictor

    predictor = Predictor(model, by=by, among=among, unknown_above=unknown_above)
    arrays, names = [], []
    for path in inputs:
        x, called = read_inputs(path, predictor.shape)
        arrays.append(predictor.checked(x))
        names += (
            called if len(inputs) == 1 else [path.name if len(called) == 1 else f"{path}:{name}" for name in called]
        )
    rows = list(zip(names, predictor.classify(np.concatenate(arrays)), strict=True))
    if as_json:
        typer.echo(json.dumps([{"input": name, **asdict(found)} for name, found in rows], indent=1))
    elif as_csv:
        pour(_csv(rows))
    else:
        _show(rows, predictor)


def _csv(rows: list[tuple[str, "Prediction"]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["input", "answer", "label", "confidence", "distance"])
    for name, found in rows:
        distance = "" if found.distance is None else f"{found.distance:.6g}"
        writer.writerow([name, found.answer, found.label, f"{found.confidence:.6g}", distance])
    return text.getvalue()


def _show(rows: list[tuple[str, "Prediction"]], predictor: "Predictor") -> None:
    table = Table()
    for title in ("input", "answer", "likeliest", "confidence", "distance"):
        table.add_column(title, justify="right" if title in ("confidence", "distance") else "left")
    for name, found in rows[:SHOWN]:
        distance = "-" if found.distance is None else f"{found.distance:.3f}"
        table.add_row(name, found.answer, found.label, f"{100 * found.confidence:.1f} %", distance)
    console.print(table)
    if len(rows) > SHOWN:
        say(f"{len(rows) - SHOWN} more; --csv or --json writes all")
    unknown = sum(found.unknown for _, found in rows)
    limit = "" if predictor.unknown_above is None else f" (farther than {predictor.unknown_above:.4g})"
    say(f"{len(rows)} inputs, {unknown} unknown{limit}; by {predictor.by}, among {predictor.among} classes")
