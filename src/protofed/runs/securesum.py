"""Secure sums in a run: what can be summed at all, and the sums of a simulation's rounds."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from torch.utils._pytree import tree_map

from protofed.config.experiment import Experiment
from protofed.engines import Engine, Trained
from protofed.engines.wire import Size
from protofed.errors import UserError
from protofed.method import Each, Mean, Tree
from protofed.ops.trees import map_nodes
from protofed.privacy.graph import needed
from protofed.runs.cohort import draw_cohort

NEEDS = ("cryptography", "Crypto")
KIND = "masked sums"
Sent = Callable[[Tree, Sequence[int], int, Any], Tree]  # uploads as clients send them: attackers lie


def check_summable(experiment: Experiment, up: Tree) -> None:
    """Refuse a secure sum of an upload that is not only Means, of too few clients, or without its packages."""
    map_nodes(lambda node: _refuse_each(experiment) if isinstance(node, Each) else None, up)
    if experiment.robust.rule != "none":
        raise UserError(
            f"robust.rule = {experiment.robust.rule!r} compares the uploads of single clients, and "
            "privacy.secure_sum hides them. Use robust.rule = 'none' or privacy.secure_sum = false."
        )
    cohort = len(draw_cohort(experiment, 0))
    if cohort < 2:
        raise UserError(
            "privacy.secure_sum = true, but a round has one client, whose upload is the sum. Use more clients, or a "
            "larger participation."
        )
    needed(experiment.privacy.threshold, cohort)
    if missing := [name for name in NEEDS if find_spec(name) is None]:
        package = {"Crypto": "pycryptodome"}.get(missing[0], missing[0])
        raise UserError(
            f"privacy.secure_sum needs {package}, which is not installed. Install it: pip install 'protofed[secure]'."
        )


def _refuse_each(experiment: Experiment) -> None:
    raise UserError(
        f"privacy.secure_sum = true, but {experiment.method_name} sends something that the server must see client by "
        "client. Use a method that sends only Means, such as fedproto, fednh, fedpr or fedavg."
    )


def caps(experiment: Experiment, forms: Sequence[Mean], samples: int) -> tuple[float, ...]:
    """The largest weight of each Mean of an upload, and of the loss, which counts every sample of every step. With
    noise there is one vector, and no loss."""
    from protofed.privacy.fixed import caps_of

    if experiment.privacy.noisy:
        return (1.0,)
    epochs = sum(phase.passes(experiment.local_epochs) for phase in experiment.method.phases())
    return *caps_of(forms, samples), float(max(1, samples) * max(1, epochs))


def with_loss(up: Tree, loss: Mean | None) -> Tree:
    """What a client puts into a sum."""
    return {"up": up} | ({} if loss is None else {"loss": loss})


class SecureRounds:
    """Sums the uploads of a simulation's rounds by the protocol of a federation."""

    def __init__(self, experiment: Experiment, engine: Engine, sent: Sent, tell: Callable[[str], None]) -> None:
        self.experiment, self.engine, self.sent, self.tell = experiment, engine, sent, tell
        self._sums: Any = None

    def summed(self, trained: Trained, cohort: Sequence[int], round: int, centres: Any) -> Trained:
        """A round whose uploads, one row per client, are summed; others as they are."""
        if not self.experiment.privacy.secure_sum or trained.secure or trained.up is None:
            return trained
        from protofed.privacy.fixed import means_of
        from protofed.privacy.simulated import SimulatedSums

        self._sums = self._sums or SimulatedSums(self.experiment.privacy, len(cohort))
        rows = self.sent(trained.up, cohort, round, centres or {})
        largest = max(self.engine.samples(cohort))
        limits = caps(self.experiment, means_of(rows), largest)
        opened, traffic = self._sums.sum(with_loss(rows, trained.loss), cohort, round, limits)
        if opened.cut:
            self.tell(cut_note(round + 1, opened.cut, self.experiment.privacy.range))
        sent = Size(traffic.up, trained.sent.params, {KIND: traffic.up})
        loss = tree_map(lambda t: t[None], opened.up["loss"])
        down = Size(traffic.down, 0, {KIND: traffic.down})
        return trained._replace(up=opened.up["up"], loss=loss, sent=sent, received=trained.received + down, secure=True)


def cut_note(round: int, cut: int, range: float) -> str:
    """A line about numbers that did not fit the grid."""
    return (
        f"round {round}: {cut:,} numbers of the uploads were beyond privacy.range = {range:g} and were cut. If that "
        "goes on, use a larger range in a new run"
    )
