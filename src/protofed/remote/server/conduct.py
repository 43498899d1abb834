"""What follows from members' conduct and the operator's orders: uploads beyond a bound, rounds taken back, bans."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from protofed.errors import UserError
from protofed.method import Mean, Tree
from protofed.remote.server.asking import Asking
from protofed.remote.server.bounds import UploadVerdict, clip_upload, judge, part_sizes
from protofed.remote.server.orders import GoBack, ban_or_not, rounds_kept, waiting_orders
from protofed.remote.server.roster import Member, Roster
from protofed.remote.server.status import Status
from protofed.runs.folder import RunFolder

Answers = dict[int, tuple[Tree, Mean]]  # by client: upload and loss


class Conduct:
    """Judges uploads and rounds, with the ledger as its memory."""

    def __init__(self, folder: Path, roster: Roster, status: Status, asking: Asking) -> None:
        self.folder, self.roster, self.status, self.asking = folder, roster, status, asking

    def bounded(
        self, round: int, answers: Answers, dealt: Mapping[int, Tree], members: Sequence[Member]
    ) -> tuple[Answers, dict[int, dict[str, Any]]]:
        """The answers that may be merged, none of which is larger than the bounds allow, and their figures."""
        bounds = self.roster.settings.bounds
        answers = {number: one for number, one in answers.items() if number not in self.status.ledger.out}
        forms = {member.number: member.form for member in members}
        here = {number: part_sizes(up, dealt[number], forms[number]) for number, (up, _) in answers.items()}
        verdicts = judge(bounds, here, self.status.ledger.latest(round))
        kept: Answers = {}
        sizes: dict[int, dict[str, Any]] = {}
        for number, (up, loss) in answers.items():
            verdict = verdicts.get(number, UploadVerdict("", 0.0, 0.0, 0.0, {}))
            own = {part: figure.size for part, figure in here[number].items()}
            if verdict.beyond and bounds.action == "refuse":
                self.asking.refuse(number, verdict.words)
                continue
            if verdict.beyond and bounds.action == "clip":
                self.status.clip(number, verdict.words)
                up = clip_upload(up, dealt[number], verdict.beyond)
                own |= verdict.beyond
            kept[number] = up, loss
            sizes[number] = {"figures": own, "part": verdict.part, "times": verdict.times, "share": verdict.share}
        return kept, sizes

    def merged(self, round: int, sizes: dict[int, dict[str, Any]]) -> None:
        """These clients' uploads are what a round is made of."""
        self.status.ledger.merge(round, sizes)
        shown = {self.status.name(n): {key: one[key] for key in ("part", "times", "share")} for n, one in sizes.items()}
        self.status.log("merged", sync=False, round=round, clients=shown)

    def judges_of(self, round: int) -> set[int]:
        """Whose word decides whether the state after a round is of use: its clients and those that are here now; of
        the first state, which nobody has made, all clients."""
        ledger = self.status.ledger
        made = ledger.merged.get(round, {}) if round else self.status.clients
        return {*made, *self.roster.members} - set(ledger.out)

    def undo(self, round: int, why: str) -> NoReturn:
        """Take back the last round, whose outcome is of no use; who sent more than the default bound is put out."""
        ledger = self.status.ledger
        said, blamed = f"round {round} is taken back: {why}", False
        if found := ledger.stands_out(round):
            number, one = found
            name, times = self.status.name(number), f"{one['times']:.3g} times the usual"
            said += f". The upload that stood out most is {name}'s ({one['part'] or 'all of it'}: {times})"
            blamed = number in ledger.out or one["times"] > self.roster.settings.bounds.factor
        if not blamed and (round == 0 or ledger.undone.get(round, 0) > 0):
            most = f"The largest was {name}'s ({times}). " if found else ""
            raise UserError(
                f"round {round + 1}: {why}, and no upload stands out that could be the cause. {most}The rounds before "
                "are saved. Start a new run with a lower optimizer.lr or optimizer.clip, or look at the clients' data."
            )
        if found and blamed and number not in ledger.out:
            self.status.put_out(number, f"in round {round}, which was taken back, its upload stood out ({times})")
            self.roster.put_out(number)
        if not blamed:
            ledger.undone[round] = ledger.undone.get(round, 0) + 1
        self.status.tell(said)
        self.status.log("undone", round=round, reason=said)
        kept = rounds_kept(RunFolder(self.folder / "run"))
        if kept and kept[0] >= round:  # else the same round would be taken back for ever
            raise UserError(
                f"round {round + 1}: {why}, and of the states before it none is kept but those after rounds "
                f"{', '.join(map(str, kept))}. Start a new run (remove {self.folder / 'run'}), with rounds.minimum in "
                "federation.toml so high that no client makes a round alone."
            )
        raise GoBack(round - 1)

    def look(self, round: int) -> None:
        """Carry out what the operator has ordered meanwhile; GoBack where the run has to go on from another round."""
        for one in waiting_orders(self.folder):
            if one.kind == "rollback":
                raise GoBack(round)  # it is carried out when no round is under way
            ledger = self.status.ledger
            if one.about["client"] not in self.status.clients:
                self.status.tell(
                    f"an order for client {one.about['client']}, which is not in federation.toml, is dropped"
                )
                one.path.unlink(missing_ok=True)
                continue
            number = ban_or_not(one, ledger, self.roster.settings, self.status.log, self.status.tell)
            if number in ledger.out:
                self.roster.put_out(number)
                self.status.client(number, "put out", heard=False, last_reason=ledger.out[number]["reason"])
            else:
                self.roster.let_in()
                self.status.client(number, "lost", heard=False, last_reason=None)
            one.path.unlink(missing_ok=True)
