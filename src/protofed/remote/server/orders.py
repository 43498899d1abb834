"""What an operator orders (ban, unban, rollback): a file each, which the server takes up while it runs or starts."""

import contextlib
import fcntl
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from protofed.atomic import write_atomically
from protofed.errors import UserError
from protofed.remote.server.audit import Audit
from protofed.remote.server.ledger import Ledger
from protofed.remote.settings import FederationSettings, load_federation
from protofed.runs.folder import Busy, RunFolder

KINDS = {"ban": "client", "unban": "client", "rollback": "round"}  # orders, and the number that each must have


class GoBack(Exception):
    """The run goes on from the state after an earlier round."""

    def __init__(self, round: int) -> None:
        super().__init__(f"back to round {round}")
        self.round = round


class OperatorOrder(NamedTuple):
    """One order, and the file it came in."""

    kind: str
    about: dict[str, Any]
    path: Path


def give_order(server: Path, kind: str, **about: Any) -> bool:
    """Give an order; True where it is carried out already, because no server runs that would."""
    folder = server / "orders"
    folder.mkdir(mode=0o700, exist_ok=True)
    write_atomically(folder / f"{time.time_ns()}.json", json.dumps({"order": kind, **about}).encode())
    try:
        with sole_judge(server, 0.0):
            audit = Audit(server / "audit.jsonl")
            try:
                carry_out_all(server, audit, lambda line: None)
            finally:
                audit.close()
    except Busy:
        return False
    return True


@contextlib.contextmanager
def sole_judge(server: Path, patience: float = 5.0) -> Iterator[None]:
    """Only one process judges the members of a federation: its server, or while there is none a command."""
    folder = server / "orders"
    folder.mkdir(mode=0o700, exist_ok=True)
    until = time.monotonic() + patience
    with open(folder / ".lock", "a", encoding="utf-8") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise Busy(f"{server} is being served by another process. Wait, or end that one.") from None
                time.sleep(0.05)
        yield


def waiting_orders(server: Path) -> list[OperatorOrder]:
    """The orders that wait, the oldest first; a file that is not an order is renamed to .unreadable."""
    found = []
    for path in sorted((server / "orders").glob("[0-9]*.json")):
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            kind = told.pop("order")
            if type(told[KINDS[kind]]) is not int:
                raise ValueError(f"{KINDS[kind]} is not a whole number")
            found.append(OperatorOrder(kind, told, path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            path.rename(path.with_suffix(".unreadable"))
    return found


def client_number(settings: FederationSettings, name: str) -> int:
    """The client of this name."""
    numbers = [member.number for member in settings.clients]
    found = [number for number in numbers if settings.name_of(number) == name]
    if len(found) != 1:
        raise UserError(
            f"{'no client is' if not found else 'several clients are'} called {name!r}. "
            f"There are {', '.join(settings.name_of(number) for number in numbers)}."
        )
    return found[0]


def rounds_kept(run: RunFolder) -> list[int]:
    """The rounds that a run can go back to."""
    return sorted(int(folder.name.removeprefix("round-")) for folder in run.checkpoints())


def carry_out_all(server: Path, audit: Audit, tell: Callable[[str], None]) -> int | None:
    """Carry out the orders that wait while no round is under way; the round that was gone back to, if any."""
    ledger, settings = Ledger.of(server / "ledger.json"), load_federation(server)
    run, back = RunFolder(server / "run"), None
    for one in waiting_orders(server):
        if one.kind == "rollback":
            back = roll_back_run(run, ledger, audit.add, one.about["round"], "the operator", tell)
        else:
            ban_or_not(one, ledger, settings, audit.add, tell)
        one.path.unlink()
    return back


def ban_or_not(
    one: OperatorOrder,
    ledger: Ledger,
    settings: FederationSettings,
    log: Callable[..., None],
    tell: Callable[[str], None],
) -> int:
    """Put a client out, or let it in again; its number."""
    number, name = int(one.about["client"]), settings.name_of(int(one.about["client"]))
    if one.kind == "ban":
        reason = str(one.about.get("reason") or "the operator put it out")
        ledger.put_out(number, reason, "operator", 0)
        log("put out", client=name, by="operator", reason=reason)
        tell(f"{name} is put out by the operator: {reason}")
    elif one.kind == "unban":
        ledger.let_in(number)
        log("let in", client=name, by="operator")
        tell(f"{name} is let in again by the operator")
    return number


def roll_back_run(
    run: RunFolder, ledger: Ledger, log: Callable[..., None], round: int, by: str, tell: Callable[[str], None]
) -> int:
    """Make the state after an earlier round the latest one; the round, or the nearest before it that is kept."""
    kept = rounds_kept(run)
    possible = [number for number in kept if number <= round]
    if not possible:
        tell(f"the state after round {round} is not kept any more: there are {kept}; nothing was changed")
        log("not rolled back", to=round, kept=kept)
        return kept[-1] if kept else 0
    to = possible[-1]
    log("rolled back", **{"to": to, "from": kept[-1], "by": by})
    run.file("summary.json").unlink(missing_ok=True)  # first: a run with a summary is finished
    for folder in run.checkpoints():
        if int(folder.name.removeprefix("round-")) > to:
            shutil.rmtree(folder)
    ledger.go_back(to)
    tell(f"back to the state after round {to}: round {to + 1} is next")
    return to
