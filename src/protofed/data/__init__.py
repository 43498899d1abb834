"""An experiment's data: where samples come from, and how they are split among clients."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen

from protofed.errors import UserError
from protofed.importing import Catalogue

PARTITIONS: Catalogue[type] = Catalogue(
    {
        "nway_kshot": "protofed.data.partition:NWayKShot",
        "dirichlet": "protofed.data.dirichlet:Dirichlet",
        "dirichlet_mpfedcl": "protofed.data.dirichlet:DirichletMPFedCL",
        "dirichlet_fedpr": "protofed.data.dirichlet:DirichletFedPR",
        "iid": "protofed.data.partition:Iid",
        "shards": "protofed.data.partition:Shards",
        "classes": "protofed.data.few_classes:FewClasses",
        "quantity": "protofed.data.few_classes:Quantity",
        "domain": "protofed.data.partition:OneDomain",
        "natural": "protofed.data.natural:Natural",
        "groups": "protofed.data.groups:ClassGroups",
        "flwr": "protofed.data.flower:FromFlower",
        "file": "protofed.data.partition:File",
    }
)


@dataclass(frozen=True)
class Data:
    """Where the samples come from (the [data] section of an experiment)."""

    name: str | list[str] = "digits"
    """One source, or several domains at once: digits, spiral, gaussians, a .npz file, a folder of IDX files, of images
    or of PFLlib's files (as a path, or by name in the data folder), hf:NAME for a Hugging Face data set,
    torchvision:NAME, or the import path of a function of your own (mypackage.data:load)."""
    more: list[str] = field(default_factory=list)
    """The other files of a data set that is split over several files: their samples are appended to those of `name`."""
    options: dict[str, Any] = field(default_factory=dict)
    """What a function of your own is called with, or the keys of gaussians, which computes the samples of any number
    of clients: shape, classes, ways, train, test, common_test, apart, offset."""
    ids: str = ""
    """A side table (.npz) of natural owners, row for row with the data: arrays NAME_train and NAME_test."""
    test_fraction: Annotated[float, Gt(0), Lt(1)] = 0.2
    """Share held back as test data, class by class, where a source has no test part of its own."""
    size: Annotated[int, Ge(0), Le(4096)] = 0
    """Resize images to size x size; 0 keeps them."""
    channels: Literal[0, 1, 3] = 0
    """Turn images into grey (1) or colour (3); 0 keeps them."""
    imbalance: Annotated[float, Ge(1), Le(1_000_000)] = 1.0
    """A long tail: each class keeps fewer training samples than the one before, so that the first class has this many
    times as many as the last. The samples that stay are the same for every seed; all test samples stay."""
    train_samples: Annotated[int, Ge(0)] = 0
    """Keep only this many training samples of each source, with the same share of every class; which ones is the same
    for every seed. 0: all of them."""
    test_samples: Annotated[int, Ge(0)] = 0
    """The same for its test samples."""
    normalize: Literal["auto", "half", "none"] = "auto"
    """How pixels are scaled before they reach a model: auto by the training data, half to -1..1, none not at all."""
    augment: list[Literal["crop", "flip"]] = field(default_factory=list)
    """Random changes to training images: crop (padded and shifted), flip (left to right)."""
    noise: Annotated[float, Ge(0)] = 0.1
    """spiral: standard deviation of the angle, in radians. FedNH prints N(0, 1), which is noise = 1.0, but the
    arms start only pi/3 = 1.05 apart: at 1.0 no classifier can pass 39 % accuracy, at 0.1 the best possible is 94 %."""
    counts: Annotated[list[Annotated[int, Ge(1), Le(10_000_000)]], MinLen(1)] = field(
        default_factory=lambda: [3000] * 6
    )
    """spiral: training samples of each class. FedNH's imbalanced set is [3000, 1500, 750, 375, 187, 93]."""


@dataclass(frozen=True)
class Skew:
    """How clients' samples differ, whatever the partition, in simulations (the [skew] section). Client i gets the i-th
    value of each list; after the last value, the list starts again. Empty lists change nothing."""

    noise: list[Annotated[float, Ge(0), Le(1000)]] = field(default_factory=list)
    """Standard deviation of the Gaussian noise on a client's inputs, as its model sees them."""
    rotation: list[Annotated[float, Ge(-360), Le(360)]] = field(default_factory=list)
    """Degrees by which a client's images are turned, counter-clockwise."""
    blur: list[Annotated[float, Ge(0), Le(20)]] = field(default_factory=list)
    """Standard deviation, in pixels, of the Gaussian that smooths a client's images."""
    labels: list[Annotated[float, Ge(0), Le(1)]] = field(default_factory=list)
    """Share of a client's training labels that are wrong: each of the other classes is as likely."""
    deal: Literal["turns", "rising"] = "turns"
    """turns: as above. rising: client i of N has (i + 1) / N of the one value in each list."""

    @property
    def on(self) -> bool:
        """Whether anything is changed."""
        return bool(self.noise or self.rotation or self.blur or self.labels)


@dataclass(frozen=True)
class Incremental:
    """Classes that appear over time, in simulations (the [incremental] section). The classes are dealt into tasks. In
    each task, clients train on their samples of its classes, and no longer on those of the tasks before."""

    tasks: Annotated[int, Ge(0), Le(10_000)] = 0
    """Number of tasks. They share the rounds as evenly as possible. 0: all classes are there from the first round."""
    first: Annotated[int, Ge(0)] = 0
    """Classes of the first task; the others share the rest evenly. 0: all share evenly."""
    order: Literal["number", "random"] = "number"
    """number: classes appear in the order of their numbers; random: in an order drawn by the seed."""
    keep: Annotated[int, Ge(0)] = 0
    """At most how many samples of each class of earlier tasks a client keeps training on, drawn by the seed."""

    @property
    def on(self) -> bool:
        """Whether classes appear over time."""
        return self.tasks > 0

    def task(self, round: int, rounds: int) -> int:
        """The task, from 0, of a round, from 0."""
        return min(round * self.tasks // rounds, self.tasks - 1)

    def check(self, rounds: int, patience: int, theory: bool, by_sample: bool) -> None:
        """Refuse settings that do not go with classes that appear over time."""
        if not self.on:
            if self != Incremental():
                raise UserError(
                    "incremental.first, incremental.order and incremental.keep have no effect without "
                    "incremental.tasks. Set it."
                )
            return
        if self.tasks == 1:
            raise UserError("incremental.tasks = 1 is a run in which all classes are there. Use 2 or more, or 0.")
        if rounds < self.tasks:
            raise UserError(
                f"incremental.tasks = {self.tasks}, but there are rounds = {rounds}: every task needs one. Use more "
                "rounds, or fewer tasks."
            )
        if patience:
            raise UserError(
                f"stopping.patience = {patience} may end the run before all classes of [incremental] have appeared. "
                "Leave it out."
            )
        if theory:
            raise UserError(
                "evaluate.theory is about clients whose samples stay the same, and [incremental] changes them. Use one "
                "of the two."
            )
        if by_sample:
            raise UserError(
                "privacy.unit = 'sample' accounts for samples that are there in every round, and with [incremental] "
                "they come and go. Use privacy.unit = 'client'."
            )
