"""`protofed join`"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from protofed.cli.common import DataDir, Trust, console, errors, note, say
from protofed.cli.export import tell_written as tell_export
from protofed.errors import UserError

if TYPE_CHECKING:
    from protofed.joining.join import Joining


def join(
    run: Annotated[Path, typer.Argument(help="The folder of a run, finished or not.")],
    data: Annotated[str | None, typer.Option(help="The newcomer's samples: an .npz, or any other source.")] = None,
    client: Annotated[int | None, typer.Option(help="Instead of --data: a client that the run held out.")] = None,
    model: Annotated[str | None, typer.Option(help="The newcomer's model; by default the run's own.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps; by default the run's join.steps.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over its samples, instead of --steps.")] = None,
    shots: Annotated[
        int | None,
        typer.Option(min=0, help="At most this many samples per class, 0 for all; by default the run's join.shots."),
    ] = None,
    lam: Annotated[
        str | None,
        typer.Option(help="Weight of the pull to the prototypes. Of several (16,4,1), the best on held-back shots."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Each seed draws other samples and another order: 0,1,2.")] = "0",
    out: Annotated[Path | None, typer.Option(help="Export the newcomer's model into this folder.")] = None,
    onnx: Annotated[bool, typer.Option(help="Whether --out writes model.onnx too.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    trust: Trust = False,
    data_dir: DataDir = None,
) -> None:
    """Let a new client with a few samples join a run.

    It is fine-tuned, and compared with training alone for as many steps.

    Examples:

      protofed join runs/demo-fedproto-seed0 --data mine.npz --steps 50

      protofed join RUN --client 3 --shots 20 --seeds 0,1,2 --lam 16,4,1
    """
    from protofed.cli import printing  # with PyTorch, which a typo should not wait for
    from protofed.export import check_out, export, of_newcomer
    from protofed.joining.join import join as join_run

    if out is not None:
        check_out(out, onnx)
    with printing.bar(errors, "joining") as tell:
        done = join_run(
            run,
            data=data,
            client=client,
            model=model,
            steps=steps,
            epochs=epochs,
            shots=shots,
            lam=None if lam is None else _numbers("--lam", lam),
            seeds=[int(seed) for seed in _numbers("--seeds", seeds)],
            data_dir=data_dir,
            trust=trust,
            tell=tell,
            note=note,
        )
    for text in done.notes:
        note(text)
    if as_json:
        told = {"method": done.method, "round": done.round, "judged_by": done.judged_by, "records": done.records}
        console.print_json(json.dumps(told | {"notes": done.notes}))
    else:
        _show(done)
    if out is not None:
        about = export(of_newcomer(run, done), out, onnx=onnx)
        if not as_json:
            tell_export(about, out)


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{option} {text!r} should be numbers with commas, such as 1,4.") from None


def _show(done: "Joining") -> None:
    first = done.records[0]
    table = Table(
        title=f"joined {done.method} after round {done.round}: {first['train']} samples of {len(first['classes'])} "
        f"classes, {first['steps']} steps, seeds {', '.join(str(r['seed']) for r in done.records)}",
        title_justify="left",
    )
    for title in ("accuracy", "among all classes", "among its own"):
        table.add_column(title, justify="left" if title == "accuracy" else "right")
    for what, key in (("by head", "head"), ("by nearest prototype", "proto"), ("trained alone", "alone")):
        if done.mean(key) is not None:
            table.add_row(what, _percent(done.mean(key)), _percent(done.mean(f"{key}_own")))
    if done.mean("unseen") is not None:
        table.add_row("classes never seen, by prototype", _percent(done.mean("unseen")), "")
    console.print(table)
    chosen = {record["lam"] for record in done.records}
    if chosen != {None}:
        say(f"lam: {', '.join(f'{lam:g}' for lam in sorted(chosen))}")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"
