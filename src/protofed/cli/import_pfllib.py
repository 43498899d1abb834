"""`protofed import-pfllib`"""

from pathlib import Path
from typing import Annotated, Any

import typer

from protofed.atomic import write_atomically
from protofed.cli.common import DataDir, note, say
from protofed.errors import UserError

NATURAL = {"name": "natural", "key": "client", "min_size": 2}  # every client of the folder, with its own samples


def import_pfllib(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="As it is: python main.py -data MNIST -algo FedProto ...")
    ],
    out: Annotated[Path | None, typer.Option(help="File to write; by default the experiment is printed.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Turn a PFLlib or HtFLlib command into an experiment.

    Flags without a counterpart are named. PFLlib's data folder (train/I.npz, test/I.npz, config.json) is read as it is:
    put it, or a link to it, into the data folder under the name that -data gives.

    Examples:

      protofed import-pfllib python main.py -data MNIST -m CNN -algo FedProto -gr 100 -nc 20 --out mine.toml

      protofed run mine.toml --data-dir PFLlib/dataset
    """
    import tomli_w

    from protofed.config.pfllib import translate_pfllib  # with PyTorch, which help should not wait for
    from protofed.data.readers.kinds import kind_of
    from protofed.data.sources import data_root

    def partition(name: str) -> dict[str, Any]:
        folder = data_root(data_dir) / name
        if kind_of(folder) == "pfllib":
            return NATURAL
        what = "there is no such folder" if not folder.exists() else "it is not a data folder of PFLlib"
        note(
            f"-data {name}: {what} at {folder}; each client's own samples are taken from one when the experiment runs "
            "(--data-dir). For data that is not dealt to clients yet, write another [partition]"
        )
        return NATURAL

    if out is not None and out.exists():
        raise UserError(f"--out {out} is there already. Name another file, or remove it.")
    found = translate_pfllib(command, partition)
    for text in found.notes:
        note(text)
    written = tomli_w.dumps(found.tables)
    if out is None:
        say(written.rstrip())
    else:
        write_atomically(out, written.encode())
        say(f"{out}: {len(found.notes)} remarks. Run it with:\n  protofed run {out}")
