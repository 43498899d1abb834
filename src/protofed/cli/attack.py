"""`protofed attack`"""

import json
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from protofed.cli.common import DataDir, Trust, console, note, say


class WhoseModel(StrEnum):
    """Whose model the attacker has."""

    own = "own"
    other = "other"


def attack(
    run: Annotated[Path, typer.Argument(help="The folder of a run, finished or not.")],
    clients: Annotated[int, typer.Option(min=1, max=1000, help="Clients to attack, drawn by the seed.")] = 4,
    classes: Annotated[int, typer.Option(min=1, max=1000, help="Classes of each, the largest ones.")] = 3,
    steps: Annotated[int, typer.Option(min=1, max=100_000, help="Steps of gradient descent for a picture.")] = 300,
    seed: Annotated[int, typer.Option(min=0, help="Draws clients, samples, starts and noise.")] = 0,
    model: Annotated[
        WhoseModel, typer.Option(help="The attacker has the client's own model, or another client's.")
    ] = WhoseModel.own,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; by default as in the run.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
    trust: Trust = False,
    data_dir: DataDir = None,
) -> None:
    """Measure what a curious server learns from a run's uploads.

    That is classes, pictures, members, and epsilon.

    Examples:

      protofed attack runs/demo-fedproto-seed0

      protofed attack RUN --clients 8 --classes 2 --steps 1000 --model other
    """
    began = time.monotonic()
    from protofed.leaks.attack import FILE, Options, attack_run  # with PyTorch, which a typo should not wait for
    from protofed.runs.numbers import duration

    options = Options(clients, classes, steps, seed, model.value)
    done = attack_run(run, options, data_dir=data_dir, device=device, trust=trust, tell=note)
    if as_json:
        console.print_json(json.dumps(done.told))
        return
    _show(done.told)
    say(f"file: {done.folder / FILE}" + (f"\npicture: {done.picture}" if done.picture else ""))
    say(f"time: {duration(time.monotonic() - began)}")


def _show(told: dict[str, Any]) -> None:
    held = told["holdings"]
    say(f"{told['method']}, after round {told['round']}: the server sees {told['view']}")
    right = "" if held["classes_right"] is None else f" ({_share(held['classes_right'])} of guesses right)"
    say(f"classes of a client: {held['classes']}{right}; numbers of samples: {held['counts']}")
    whose = "the client's own model" if told["model"]["whose"] == "own" else "another client's model"
    sent, public = told["model"]["sent"], told["model"]["public"]
    how = "is sent" if sent else "is public" if public else "is not sent in this method: it was stolen, or lent"
    say(f"the attacker has {whose}, which {how}")
    console.print(_table(told))
    if (epsilon := told["epsilon"]) is not None:
        one, every = epsilon["one_release"], epsilon["all_releases"]
        for what, line in (("one release", one), (f"all {every['releases']} releases", every)):
            say(
                f"epsilon of {what}: {line['claimed']:.4g} claimed, at least {line['lower_bound']:.3g} by the best "
                f"attack (unit: {epsilon['unit']}, delta {epsilon['delta']:g})"
            )


def _table(told: dict[str, Any]) -> Table:
    table = Table(
        title="by the number of samples behind a prototype (in brackets: the class mean as a guess; then the same "
        "likeness to as many other samples)",
        title_justify="left",
    )
    keys = {"psnr": "PSNR, dB", "ssim": "SSIM", "error": "error", "correlation": "correlation"}
    images = {line["size"]: line for line in told["reconstruction"]}
    known = [key for key in keys if any(line["likely"][key] is not None for line in images.values())]
    known = [key for key in known if key != "error" or "psnr" not in known]
    for title in ("samples", *(keys[key] for key in known), "members: AUC", "TPR at 1 %", "at 0.1 %"):
        table.add_column(title, justify="right")
    for line in told["membership"]:
        cells = [str(line["size"]) if line["size"] else f"as sent ({line['samples']:g})"]
        cells += [_pair(images.get(line["size"]), key) for key in known]
        best = max((line["distance"], line["likelihood"]), key=lambda one: one["auc"])
        table.add_row(*cells, f"{best['auc']:.3f}", _share(best["tpr_at_0.01"]), _share(best["tpr_at_0.001"]))
    return table


def _pair(line: dict[str, Any] | None, key: str) -> str:
    """The numbers of the attack that comes closest."""
    if line is None:
        return "-"
    best = max((line["likely"], line["smooth"]), key=lambda one: one["correlation"])
    values = best[key], line["guess"][key], best[f"other_{key}"]
    digits = 1 if key == "psnr" else 2
    return "-" if None in values else "{:.{d}f} ({:.{d}f}; {:.{d}f})".format(*values, d=digits)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
