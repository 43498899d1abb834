"""Hyperparameters chosen on validation samples: for each method, only the chosen ones are shown and tested."""

import collections
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protofed.errors import UserError
from protofed.report.columns import VALIDATION
from protofed.report.runs import Run

SELECT = {"validation": "own", "validation-global": "global"}  # what --select takes, and whose accuracy it means
LATER = "Run with evaluate.validation=0.1, say, which holds a tenth of every client's training samples back."


@dataclass(frozen=True)
class Candidate:
    """One set of parameters of one method in one setting, with its runs by seed."""

    parameters: Mapping[str, str]
    runs: Mapping[int, Run]


class Choice(NamedTuple):
    """The choice for one method in one setting, and how clear it was."""

    parameters: Mapping[str, str]
    accuracy: float  # on validation samples, mean over clients and seeds
    tried: int
    second: float | None  # of the next best
    fewer: int  # candidates that lack seeds, and so were not compared


def choose_candidate(
    method: str, candidates: Sequence[Candidate], by: str, best_round: bool
) -> tuple[Candidate, Choice]:
    """The candidate with the highest accuracy on validation samples; of equals the first.

    by: whose accuracy, "own" or "global"; best_round: that of the best round, for tables that show the test numbers of
    that round, and else of the last one
    """
    most = max(len(candidate.runs) for candidate in candidates)
    whole = [candidate for candidate in candidates if len(candidate.runs) == most]
    if len({tuple(sorted(candidate.runs)) for candidate in whole}) > 1:
        raise UserError(
            f"--select: the candidates of {method} have different seeds, so that they cannot be compared. "
            "Run the same seeds for all."
        )
    scores = [sum(_accuracy(run, by, best_round) for run in candidate.runs.values()) / most for candidate in whole]
    first = scores.index(max(scores))
    others = sorted(scores[:first] + scores[first + 1 :])
    second = others[-1] if others else None
    chosen = whole[first]
    return chosen, Choice(chosen.parameters, scores[first], len(whole), second, len(candidates) - len(whole))


def _accuracy(run: Run, by: str, best_round: bool) -> float:
    """A run's accuracy on validation samples, never on test samples. Raises if there are none."""
    keys = [VALIDATION[by], VALIDATION["own"]]  # a method without a global model is chosen by its clients' own
    known = next((values for key in keys if (values := run.column(key)[1])), None)
    if known is None:
        raise UserError(
            f"--select: {run.folder} has no accuracy on validation samples, and choosing on the test set is not "
            f"offered. {LATER}"
        )
    return max(known) if best_round else known[-1]


def told(choices: Mapping[str, Mapping[str, Choice]], by: str, best_round: bool) -> Iterator[str]:
    """Remarks on all choices: method -> setting -> choice."""
    when = "in the best round" if best_round else "after the last round"
    whose = "the global model's where there is one, else the clients' own" if by == "global" else "the clients' own"
    yield (
        f"parameters are chosen by accuracy on validation samples ({whose}, mean over clients and seeds, {when}), and "
        "never by the numbers of this table"
    )
    for method, some in choices.items():
        for setting, choice in some.items():
            yield _one(method, setting, choice)
    tried = collections.defaultdict(list)
    for method, some in choices.items():
        tried[max(choice.tried for choice in some.values())].append(method)
    if len(tried) > 1:
        counts = "; ".join(f"{count}: {', '.join(map(_quoted, names))}" for count, names in sorted(tried.items()))
        yield f"methods had different numbers of candidates ({counts}): who had more was tuned more"


def _one(method: str, setting: str, choice: Choice) -> str:
    of = f"chosen for {_quoted(method)}{f' on {setting}' if setting else ''}: {shown(choice)}"
    if choice.second is None:
        text = f"{of}, the only candidate"
    else:
        text = (
            f"{of}, of {choice.tried} candidates, with {100 * choice.accuracy:.2f} % on validation samples; the next "
        )
        text += f"best had {100 * choice.second:.2f} %"
    return text + (f"; {choice.fewer} candidates lack seeds and were not compared" if choice.fewer else "")


def shown(choice: Choice) -> str:
    """The parameters of a choice, without their sections."""
    return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in choice.parameters.items()) or "no parameters"


def _quoted(name: str) -> str:
    return repr(name) if "," in name else name
