"""What a run has released, on disk before anybody sees it: so that a run that is stopped pays for everything once."""

import errno
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from protofed.errors import UserError

LEDGER = "privacy.jsonl"


class Released(NamedTuple):
    """One noised sum."""

    round: int
    attempt: int  # 0, 1, ...: a round that was done again with another result
    clients: tuple[int, ...]  # whose data are in it
    digest: str  # of its bytes
    signal_to_noise: float
    noise: float  # standard deviation over the clip; 0 if nothing but what the steps made was released
    steps: int = 0  # training steps with noise that led to it, of each client
    rate: float = 0.0  # how likely each sample is in a step
    step_noise: float = 0.0  # standard deviation over privacy.sgd_clip
    step_signal: float = 0.0  # signal-to-noise of these steps, on average
    clip: float = 0.0  # where it follows the clients' lengths: with which clip
    next_clip: float = 0.0  # and what the release makes of it
    choice: float = 0.0  # the epsilon with which each client chose its dimensions
    unit: str = ""  # whose presence it hides, in a client's own account; empty: its own


OF_STEPS = ("steps", "rate", "step_noise", "step_signal")
OF_CLIP = ("clip", "next_clip")
OF_CHOICE = ("choice",)
OF_UNIT = ("unit",)


class SpendingLedger:
    """All releases of a run, in order; a line is never changed or removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[Released] = []
        self.times: Counter[int] = Counter()
        """How many releases each client's data are in."""
        for line in _read(path):
            self._count(line)

    def _count(self, line: Released) -> None:
        self.lines.append(line)
        self.times.update(line.clients)

    def of_round(self, round: int) -> list[Released]:
        """The releases of a round, in the order of their attempts."""
        return [line for line in self.lines if line.round == round]

    def most_until(self, line: Released) -> int:
        """The most releases that any client's data were in when this one was made."""
        if line is self.lines[-1]:
            return self.most()
        times = Counter(number for one in self.lines[: self.lines.index(line) + 1] for number in one.clients)
        return max(times.values(), default=0)

    def most(self, cohort: Sequence[int] = ()) -> int:
        """The most releases that any client's data are in, or any of these clients' if one more is made of them."""
        one_more = (self.times[number] + 1 for number in cohort)
        return max(one_more, default=max(self.times.values(), default=0))

    def add(self, line: Released) -> None:
        """Write a release down; when this returns, it is on disk."""
        with open(self.path, "ab", buffering=0) as file:
            unknown = (
                *(() if line.steps else OF_STEPS),
                *(() if line.clip else OF_CLIP),
                *(() if line.choice else OF_CHOICE),
                *(() if line.unit else OF_UNIT),
            )
            known = {key: value for key, value in line._asdict().items() if key not in unknown}
            end, content = file.seek(0, os.SEEK_END), json.dumps(known, allow_nan=False).encode() + b"\n"
            try:
                if file.write(content) != len(content):
                    raise OSError(errno.ENOSPC, f"no room for a line in {self.path}")
                os.fsync(file.fileno())
            except OSError:  # nothing is released, and half a line would spoil the next one
                file.truncate(end)
                raise
        self._count(line)

    def check(self, rounds: int) -> None:
        """Refuse to go on where the ledger lacks one of the rounds that are done: nobody knows what they cost."""
        missing = set(range(1, rounds + 1)) - {line.round for line in self.lines}
        if missing:
            raise UserError(
                f"{self.path} says nothing of round {min(missing)}, which is done, so what was spent is not known. "
                "Restore the file, or start again in another folder."
            )


def _read(path: Path) -> list[Released]:
    """All lines; one that a kill cut off was never released, and is taken off."""
    if not path.is_file():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    try:
        return [_line(json.loads(text)) for text in whole.splitlines()]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged ({error}), so what was spent is not known. Restore the file, or start again in "
            "another folder."
        ) from None


def _line(raw: Any) -> Released:
    line = Released(**{**raw, "clients": tuple(raw["clients"])})
    whole = (line.round, line.attempt, line.steps, *line.clients)
    if any(type(number) is not int or number < 0 for number in whole) or not isinstance(line.digest, str):
        raise ValueError("a number is not one")
    if line.unit not in ("", "sample"):
        raise ValueError(f"{line.unit!r} is not a unit")
    parts = (line.signal_to_noise, line.noise, line.rate, line.step_noise, line.step_signal)
    if any(type(number) not in (int, float) for number in (*parts, line.clip, line.next_clip, line.choice)):
        raise ValueError("a number is not one")
    least = 0 if line.steps else 5e-324
    if not least <= line.noise < math.inf:
        raise ValueError("its noise is not a positive number")
    if not 0 <= line.clip < math.inf or not 0 <= line.next_clip < math.inf or bool(line.clip) != bool(line.next_clip):
        raise ValueError("its clip is not a positive number")
    if not 0 <= line.choice < math.inf:
        raise ValueError("the price of its choice is not a positive number")
    if line.steps and not (0 < line.rate <= 1 and 0 < line.step_noise < math.inf):
        raise ValueError("the noise of its steps is not a positive number")
    return line


def digest_of(*released: Tensor) -> str:
    """A hash of the bytes of what is released."""
    digest = hashlib.sha256()
    for part in released:
        digest.update(part.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
