"""`protofed oneshot`"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from protofed.cli.common import DataDir, Overrides, console, note, say
from protofed.errors import UserError

if TYPE_CHECKING:
    from protofed.data.domain import Domain
    from protofed.joining.heads import SummedHead

ENCODER, METHOD = "efficientnet_lite0", "lda"


def oneshot(
    out: Annotated[Path, typer.Argument(help="Folder of the head; clients join one that is there.")],
    overrides: Overrides = None,
    clients: Annotated[
        list[str] | None,
        typer.Option("--client", metavar="DATA", help="A client's data, or a folder with data sets: one client each."),
    ] = None,
    leave: Annotated[
        list[str] | None, typer.Option("--leave", metavar="DATA", help="The data of a client that leaves.")
    ] = None,
    encoder: Annotated[str | None, typer.Option(help=f"By default {ENCODER} ('protofed list models').")] = None,
    method: Annotated[str | None, typer.Option(help=f"classmeans, lda, qda or ridge; by default {METHOD}.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Make one head for all clients in one round.

    It is computed from sums of their embeddings by a frozen encoder.

    The head is exactly what all samples in one place would give. Clients that join later are added, and clients that
    leave are subtracted: nothing of them remains.

    Examples:

      protofed oneshot head --client sites

      protofed oneshot head --client north.npz --client south.npz --method ridge method.gamma=10

      protofed oneshot head --client west.npz --leave south.npz
    """
    if not clients and not leave:
        raise UserError("name whose data it is: --client DATA for who joins, --leave DATA for who leaves.")
    from protofed.joining.heads import ABOUT, SummedHead, plan_of, read_clients_of  # with PyTorch

    there = (out / ABOUT).is_file()
    if there and (encoder or method or overrides):
        raise UserError(
            f"{out} is a head already, with its own encoder and method. Leave out --encoder, --method and keys, or "
            "name another folder."
        )
    if not there and (leave or (out.exists() and (not out.is_dir() or any(out.iterdir())))):
        raise UserError(f"{out} is not a one-shot head. Name the folder of one, or a new one without --leave.")
    head = SummedHead.read(out) if there else None
    plan = head.plan if head else plan_of(encoder or ENCODER, method or METHOD, tuple(overrides or ()))
    leaving = [found for word in leave or () for found in read_clients_of(word, plan, data_dir)]
    coming = [found for word in clients or () for found in read_clients_of(word, plan, data_dir)]
    head = head or SummedHead.begun(plan, coming[0][1].shape)
    for name, domain in leaving:
        head.leave(name, head.embed(domain, note))
        say(f"{name} left")
    came = []
    for name, domain in coming:
        embedded = head.embed(domain, note)
        head.add(name, embedded)
        came.append((name, embedded))
    for text in head.remarks():
        note(text)
    _show(head, came)
    head.save(out)
    many = sum(one["samples"] for one in head.clients.values())
    say(f"head: {out}, of {len(head.clients)} clients with {many:,} samples and {len(head.classes)} classes")


def _show(head: "SummedHead", came: list[tuple[str, "Domain"]]) -> None:
    if not came:
        return
    table = Table()
    for title in ("client", "training samples", "test samples", "accuracy"):
        table.add_column(title, justify="left" if title == "client" else "right")
    right = many = 0
    for name, embedded in came:
        found, tests = head.right(embedded)
        right, many = right + found, many + tests
        table.add_row(name, f"{len(embedded.y_train):,}", f"{tests:,}", f"{found / tests:.1%}" if tests else "-")
    if len(came) > 1 and many:
        table.add_row("all of these", "", f"{many:,}", f"{right / many:.1%}")
    console.print(table)
