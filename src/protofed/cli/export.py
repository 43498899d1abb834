"""`protofed export`"""

from pathlib import Path
from typing import Annotated, Any

import typer

from protofed.cli.common import DataDir, Trust, note, say
from protofed.errors import UserError


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run, finished or not.")],
    client: Annotated[str, typer.Option(help="The number of a client, or 'global' for the global model.")],
    out: Annotated[Path, typer.Option(help="A new folder for the files.")],
    quantile: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of known samples that stay below the 'unknown' threshold.")
    ] = 0.95,
    onnx: Annotated[bool, typer.Option(help="Write model.onnx too (pip install 'protofed[export]').")] = True,
    trust: Trust = False,
    data_dir: DataDir = None,
) -> None:
    """Write a client's model as files that need no protofed.

    They are a torch.export graph, ONNX, tensors, prototypes and class names.

    Examples:

      protofed export runs/demo-fedproto-seed0 --client 3 --out client3

      protofed export RUN --client global --out model --no-onnx
    """
    who = _who(client)
    from protofed.export import check_out, of_run  # with PyTorch, which a typo should not wait for
    from protofed.export import export as export_model

    check_out(out, onnx)
    subject, notes = of_run(run, who, data_dir, trust=trust, tell=note)
    for text in notes:
        note(text)
    tell_written(export_model(subject, out, onnx=onnx, quantile=quantile), out)


def tell_written(about: dict[str, Any], out: Path) -> None:
    """What was written."""
    inputs, far = about["input"], about["unknown"]
    say(f"{about['architecture']} of {about['method']}, client {about['client']}, after round {about['round']}")
    say(f"input: {inputs['takes']} (any number, {', '.join(map(str, inputs['shape']))}), scaled inside")
    judged = f"classifies by {about['inference']}, among {about['candidates']} classes"
    say(f"outputs: {', '.join(about['outputs'])}; {judged}")
    if far:
        test = far["own_test_unknown"]
        share = "" if test is None else f"; so are {100 * test:.1f} % of its own test samples"
        say(f"unknown: farther than {far['above']:.4g}, the {far['quantile']:g} quantile of {far['of']}{share}")
    say(f"files: {', '.join(sorted(file.name for file in out.iterdir()))}\nfolder: {out}")


def _who(text: str) -> int | str:
    if text == "global":
        return text
    try:
        return int(text)
    except ValueError:
        raise UserError(f"--client {text!r} should be a client's number, or 'global'.") from None
