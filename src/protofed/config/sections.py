"""The keys of an experiment's file that do not depend on its method, data or partition."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator

from protofed.errors import UserError, did_you_mean
from protofed.importing import MEMORY, is_path


def _device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name):
        raise ValueError("should be auto, cpu, cuda or cuda:N")
    return name


@dataclass(frozen=True)
class EngineChoice:
    """How clients are run (the [engine] section)."""

    name: Literal["auto", "stacked", "reference", "ray"] = "auto"
    """stacked trains clients of one model together, reference one after another. auto stacks on a GPU, and on a CPU
    models of up to 200,000 parameters. ray spreads what auto does over the machines of a cluster."""
    chunk: Annotated[int, Ge(0)] = 0
    """Most clients to stack at once; 0: all of a round."""
    threads: Annotated[int, Ge(0), Le(1024)] = 0
    """Threads on the CPU: groups of stacked clients at a time, or torch's own threads. 0 takes all cores; for small
    models it takes one torch thread, and for each of ray's workers an eighth of a machine's cores."""
    workers: Annotated[int, Ge(0), Le(4096)] = 0
    """Processes that ray spreads clients over, each with a GPU or `threads` cores; 0: as many as there is room for."""
    ordered: bool = False
    """Add up uploads one by one, in the order of the clients, so that sums do not depend on groups and threads."""
    compile: Literal["auto", "always", "never"] = "auto"
    """Compile the training step: if the run is long enough to repay it (auto), always, or never."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """fp32 is full single precision; tf32 rounds factors to ten bits on a GPU; bf16 to seven bits (weights and sums
    stay fp32). Each is faster and less exact than the one before. For papers use fp32."""


@dataclass(frozen=True)
class Evaluate:
    """How often each thing is measured, in rounds (the [evaluate] section); 0: only after the last round."""

    own: Annotated[int, Ge(0)] = 1
    """The round's clients on their own test sets."""
    gm: Annotated[int, Ge(0)] = 1
    """The global model, if there is one, on the global test set (FedNH's GM)."""
    pm: Annotated[int, Ge(0)] = 0
    """The round's clients on the global test set: over the classes that each holds, and with each class weighted by its
    share of the client's samples (FedNH's PM(V) and PM(L)). It costs clients x test samples."""
    validation: Annotated[float, Ge(0), Le(0.5)] = 0.0
    """Share of every client's training samples that is held back for choosing a round; measured whenever `own` is."""
    auc: Literal["auto", "always", "never"] = "auto"
    """Whether AUC and balanced accuracy are measured after the last round: if there are two classes (auto), always, or
    never. AUC needs the scores of all test samples at once."""
    pm_clients: Annotated[int, Ge(0)] = 1000
    """Most clients to measure on the global test set after the last round, evenly spaced; 0: all."""
    clients: Annotated[int, Ge(0)] = 0
    """Most clients to measure after the last round, evenly spaced; 0: all, or 1,000 if data is computed when a client
    is drawn. Only these go through a method's last phases."""
    theory: Annotated[int, Ge(0)] = 0
    """The constants of FedProto's or FedNH's theorem, and whether its condition holds, on three clients; 0: never."""


@dataclass(frozen=True)
class Record:
    """What is kept for reports, apart from the numbers of a round (the [record] section)."""

    enabled: bool = True
    """Whether anything is kept: prototype movements, views.npz and confusion.npz. Results do not depend on it."""
    snapshots: Annotated[int, Ge(0), Le(1000)] = 8
    """Number of rounds after which test samples' embeddings and all prototypes are kept in views.npz: the first, the
    last, and some in between; 0: none."""
    clients: Annotated[int, Ge(1), Le(1000)] = 8
    """Most clients whose samples and local prototypes are in a snapshot, evenly spaced."""
    samples: Annotated[int, Ge(1), Le(100_000)] = 400
    """Most test samples in a snapshot, of all these clients together."""
    models: bool = True
    """Whether a finished run keeps its models, for `export`, `join` and pictures of embeddings; without them a sweep of
    large models for many clients does not fill the disk. An unfinished run keeps them, to resume from."""


@dataclass(frozen=True)
class Join:
    """How clients that did not train join (the [join] section)."""

    steps: Annotated[int, Ge(1), Le(1_000_000)] = 100
    """Training steps of each phase. Training alone, for comparison, takes the same number in total."""
    shots: Annotated[int, Ge(0)] = 20
    """At most how many samples of each class a newcomer trains on; 0: all."""
    lam: list[Annotated[float, Ge(0)]] = field(default_factory=list)
    """Weight of the pull towards the prototypes, for methods with a `lam`; empty: the method's own. If there are
    several, each newcomer takes the best one on a quarter of its shots, which are held back; among equally good ones,
    the first."""


@dataclass(frozen=True)
class Robust:
    """How the server combines uploads when some clients may send anything (the [robust] section)."""

    rule: Literal["none", "clip", "centred_clip", "median", "trimmed", "geometric_median", "krum", "multi_krum"] = (
        "none"
    )
    """What replaces the mean over clients. clip and centred_clip bound how far each client may be from the last
    aggregate. All others compare the clients' uploads with each other, so the server must see every single upload."""
    norm: Annotated[float, Ge(0), Le(1e30)] = 0.0
    """clip, centred_clip: the bound. 0 takes `factor` times the median distance of this round's clients."""
    factor: Annotated[float, Gt(0), Le(1000)] = 2.0
    """clip, centred_clip: the bound as a multiple of the median distance, if `norm` is 0."""
    passes: Annotated[int, Ge(1), Le(100)] = 5
    """centred_clip, geometric_median: how many times the centre is corrected in a round."""
    tolerate: Annotated[float, Ge(0), Lt(0.5)] = 0.3
    """trimmed: the share of clients cut off at each end. krum, multi_krum: the share of clients that may be attackers
    (the paper's f / n). Rounded up to whole clients; for prototypes, separately for each class."""
    cap: Annotated[float, Ge(0), Le(1e6)] = 2.0
    """With a rule, no client counts more than `cap` times the median weight of those that send. 0: all count alike."""

    @property
    def singly(self) -> bool:
        """Whether the rule compares uploads, so the server must see each of them."""
        return self.rule not in ("none", "clip", "centred_clip")


USUAL_FACTOR = {"sign_flip": 3.0, "scale": 10.0, "noise": 5.0, "collude": 1.5, "backdoor": 3.0}


@dataclass(frozen=True)
class Attack:
    """Clients of a simulation that do not follow the method (the [attack] section)."""

    kind: Literal["none", "sign_flip", "scale", "noise", "label_flip", "swap", "backdoor", "collude"] = "none"
    """sign_flip sends the opposite of the client's change (for prototypes, their opposite). scale multiplies the
    upload by `factor`. noise adds noise. label_flip trains on wrong labels (y becomes C - 1 - y). swap exchanges two
    classes' prototypes, or their rows of the head. backdoor trains on samples with a trigger labelled `target`, and
    pushes the prototypes of all other classes away from it. collude: all attackers send the honest clients' mean
    minus `factor` standard deviations."""
    share: Annotated[float, Ge(0), Lt(1)] = 0.2
    """Share of the clients that attack, drawn by the seed: at least one client, unless it is 0."""
    who: Literal["any", "smallest", "largest"] = "any"
    """Attackers are drawn from all clients, or are those with the fewest or the most training samples."""
    factor: Annotated[float, Ge(0), Le(1e30)] = 0.0
    """How strong the attack is. 0 takes the kind's usual factor: 3 for sign_flip, 10 for scale, 5 for noise (times the
    upload's root mean square), 1.5 for collude, and 3 for backdoor (multiplies a model's change, and the distance that
    prototypes are pushed)."""
    target: Annotated[int, Ge(0)] = 0
    """backdoor: the class that samples with the trigger should be taken for."""

    @property
    def on(self) -> bool:
        """Whether any client attacks."""
        return self.kind != "none" and self.share > 0

    @property
    def strength(self) -> float:
        """The factor in force."""
        return self.factor or USUAL_FACTOR.get(self.kind, 1.0)

    @property
    def uploads(self) -> bool:
        """Whether attackers change what they send, not only what they train on."""
        return self.on and self.kind != "label_flip"


SELECTIONS = ("random", "size", "power_of_choice")


@dataclass(frozen=True)
class Selection:
    """Who takes part in a round, if not all clients do (the [selection] section)."""

    rule: str = "random"
    """random: all clients alike. size: clients with more training samples more often, in proportion. power_of_choice:
    of `candidates` drawn by size, those whose loss was highest when they last trained; whoever never trained comes
    first. The import path of a function of your own (mypackage.module:choose) chooses as it likes."""
    candidates: Annotated[int, Ge(0), Le(1_000_000)] = 0
    """power_of_choice: how many are drawn to choose from; 0: twice as many as take part."""

    def check(self, noisy: bool, secure_sum: bool) -> None:
        """Refuse an unknown rule, or one that needs what clients do not tell."""
        rule, chosen = self.rule, f"selection.rule = {self.rule!r}"
        if rule not in SELECTIONS and not is_path(rule) and not rule.startswith(MEMORY):
            raise UserError(
                f"{chosen} is unknown. {did_you_mean(rule, SELECTIONS)} A function of your own is named by import "
                "path: mypackage.module:choose."
            )
        if self.candidates and rule != "power_of_choice":
            raise UserError(
                f"selection.candidates = {self.candidates} is for selection.rule = 'power_of_choice', and it is "
                f"{rule!r}. Set the rule, or leave the key out."
            )
        if rule != "random" and noisy:
            raise UserError(
                f"{chosen} looks at clients' samples or losses, which no noise of [privacy] covers. "
                "Use selection.rule = 'random'."
            )
        if rule == "power_of_choice" and secure_sum:
            raise UserError(
                f"{chosen} needs every client's loss, and privacy.secure_sum hides them. Use selection.rule = 'size' "
                "or 'random'."
            )


@dataclass(frozen=True)
class Stopping:
    """When a run ends before its last round (the [stopping] section)."""

    patience: Annotated[int, Ge(0), Le(1_000_000)] = 0
    """The run ends after this many rounds without a better accuracy on validation samples (`evaluate.validation`); 0:
    never. The models are those of its last round; `accuracy@validation` in tables takes the best."""
    min_gain: Annotated[float, Ge(0), Lt(1)] = 0.0
    """How much higher than the best so far an accuracy has to be to count as better."""
    by: Literal["personal", "global"] = "personal"
    """Whose accuracy: the clients' own models', or the global model's on the same samples."""

    def check(self, evaluate: Evaluate, noisy: bool) -> None:
        """Refuse to stop by a number that is not measured, or that no noise covers."""
        if not self.patience:
            if self != Stopping():
                raise UserError("stopping.min_gain and stopping.by have no effect without stopping.patience. Set it.")
            return
        if not evaluate.validation or not evaluate.own:
            key, least = ("validation", 0.1) if not evaluate.validation else ("own", 1)
            raise UserError(
                f"stopping.patience = {self.patience} goes by validation samples, and evaluate.{key} = 0 measures none "
                f"between rounds. Use evaluate.{key} = {least}, or leave stopping.patience out."
            )
        if noisy:
            raise UserError(
                f"stopping.patience = {self.patience} goes by clients' validation samples, which no noise of [privacy] "
                "covers. Leave it out."
            )


@dataclass(frozen=True)
class Stragglers:
    """Clients of a simulation that are too slow for a round's deadline (the [stragglers] section)."""

    share: Annotated[float, Ge(0), Le(1)] = 0.0
    """How likely a client is slow, drawn by the seed for every client in every round."""
    slowest: Annotated[float, Gt(0), Le(1)] = 0.1
    """A slow client's speed is drawn evenly from this to 1, which is the speed of all others."""
    deadline: Annotated[float, Gt(0), Le(1)] = 1.0
    """When a round ends: 1 is the time that a client of speed 1 needs for all its steps."""
    late: Literal["partial", "drop"] = "partial"
    """partial: a late client sends what it has after the steps it had time for, at least one in each phase (FedProx).
    drop: it does not take part in the round."""

    @property
    def on(self) -> bool:
        """Whether any client is late."""
        return self.share > 0 or self.deadline < 1

    def check(self, noisy: bool, theory: bool) -> None:
        """Refuse settings that do not go with late clients."""
        if not self.on:
            if self != Stragglers():
                raise UserError(
                    "stragglers.slowest and stragglers.late have no effect while nobody is late. "
                    "Set stragglers.share or stragglers.deadline."
                )
            return
        if self.slowest == 1 and self.deadline == 1:
            raise UserError("stragglers.slowest = 1 makes slow clients as fast as all others. Use a lower speed.")
        if noisy and self.late == "drop":
            raise UserError(
                "stragglers.late = 'drop' changes who takes part, and [privacy] accounts for who is drawn. "
                "Use stragglers.late = 'partial'."
            )
        if theory:
            raise UserError(
                "evaluate.theory is about clients that take all their steps, and [stragglers] cuts some off. "
                "Use one of the two."
            )


@dataclass(frozen=True)
class Scalars:
    """The keys outside any section."""

    seed: Annotated[int, Ge(0)] = 0
    """Seed of all random numbers in the run."""
    rounds: Annotated[int, Ge(1)] = 50
    """Communication rounds."""
    clients: Annotated[int, Ge(1), Le(1_000_000)] = 20
    """Number of clients."""
    held_out_clients: Annotated[int, Ge(0)] = 0
    """Number of clients, drawn by the seed, that take part in no round and join after the last one, as [join] says."""
    participation: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of the clients that take part in a round, at least one, drawn again each round."""
    local_epochs: Annotated[int, Ge(1)] = 1
    """Passes over its data that a client makes in a round."""
    batch_size: Annotated[int, Ge(1)] = 8
    """Samples in a training step."""
    drop_last: bool = False
    """Leave out a last batch that is not full (the papers' code does); a client's only batch always stays."""
    device: Annotated[str, AfterValidator(_device)] = "auto"
    """auto, cpu, cuda or cuda:N."""
