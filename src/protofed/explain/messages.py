"""What a message contains: tensors in groups that a person can name, and what the server can tell from them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from protofed.config.experiment import Experiment
from protofed.data.batches import Federation
from protofed.engines.reference import ReferenceEngine
from protofed.engines.wire import Size
from protofed.local import Update, local_update
from protofed.method import Batch, Client, Each, Mean, Tree
from protofed.privacy import Privacy
from protofed.privacy.graph import needed
from protofed.runs.cohort import draw_cohort

KINDS = {"params": "parameters", "buffers": "buffers"}


class Leaf(NamedTuple):
    """One tensor of a message."""

    path: tuple[str, ...]  # ("model", "params", "body.conv1.weight")
    each: bool
    tensor: Tensor  # its shape and type alone, unless it is a weight
    rows: tuple[int, int] | None = None  # of a Mean with a weight per row: how many are sent, of how many
    weight: bool = False  # it is a Mean's weight


class ClientMessage(NamedTuple):
    """What one client sends or gets."""

    leaves: list[Leaf]
    size: Size


def message_tensors(
    tree: Tree, path: tuple[str, ...] = (), each: bool = False, rows: tuple[int, int] | None = None
) -> Iterator[Leaf]:
    """Every tensor of a message, and the weights of its Means."""
    if isinstance(tree, Tensor):
        yield Leaf(path, each, tree.to("meta"), rows)
    elif isinstance(tree, Mean):
        present = (int((tree.weight > 0).sum()), tree.weight.numel()) if tree.weight.ndim else None
        yield from message_tensors(tree.total, path, each, present)
        yield Leaf(path, each, tree.weight, present, weight=True)
    elif isinstance(tree, Each):
        yield from message_tensors(tree.rows, path, True, rows)
    else:
        tree = tree._asdict() if isinstance(tree, Client) else tree
        parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, part in parts:
            yield from message_tensors(part, (*path, str(key)), each, rows)


class TensorKind(NamedTuple):
    """The group that a tensor belongs to."""

    name: str
    kind: str  # weights, buffers, rows (of prototypes), numbers, or flags: what the papers do not count
    part: str  # of parameters and buffers: "body"
    each: bool


def _place(leaf: Leaf) -> TensorKind:
    for mark, kind in KINDS.items():
        if mark in leaf.path[:-1]:
            at = leaf.path.index(mark)
            return TensorKind("/".join(leaf.path[:at]) or "model", kind, leaf.path[at + 1].split(".")[0], leaf.each)
    name, kind = ("prototypes", "rows") if leaf.rows else ("model", "numbers")
    kind = kind if leaf.tensor.is_floating_point() else "flags"
    return TensorKind("/".join(leaf.path) or name, kind, "", leaf.each)


def _sent(leaf: Leaf) -> int:
    """Rows of weight 0 stay at home."""
    return leaf.tensor.numel() if leaf.rows is None else leaf.tensor.numel() // leaf.rows[1] * leaf.rows[0]


def message_summary(messages: Sequence[ClientMessage], kept: set[str], shared: str, own: str) -> dict[str, Any]:
    """The messages of a cohort by groups that a person can name, and their sizes as serialised."""
    groups: dict[TensorKind, list[list[Leaf]]] = {}
    for number, message in enumerate(messages):
        for leaf in message.leaves:
            if not leaf.weight:
                groups.setdefault(_place(leaf), [[] for _ in messages])[number].append(leaf)
    missing = kept - names_in(messages)
    listed = [_group(place, by_client, missing, own if place.each else shared) for place, by_client in groups.items()]
    raw = [sum(_sent(x) * x.tensor.element_size() for x in m.leaves if not x.weight) for m in messages]
    return {
        "clients": len(messages),
        "groups": listed,
        "numbers": _spread([message.size.params for message in messages]),
        "bytes": _spread([message.size.bytes for message in messages]),
        "bytes_beside": _spread([m.size.bytes - tensors for m, tensors in zip(messages, raw, strict=True)]),
    }


def _group(place: TensorKind, by_client: Sequence[Sequence[Leaf]], missing: set[str], seen: str) -> dict[str, Any]:
    one = max(by_client, key=len)
    rows = [leaves[0].rows[0] for leaves in by_client if leaves and leaves[0].rows]
    return {
        "name": place.name,
        "kind": place.kind,
        "parts": cover([leaf.path[-1] for leaf in one], missing) if place.part else [],
        "tensors": len(one),
        "shape": list(one[0].tensor.shape) if len(one) == 1 else None,
        "dtype": str(one[0].tensor.dtype).removeprefix("torch."),
        "dtype_bytes": one[0].tensor.element_size(),
        "rows": {**_spread(rows), "of": one[0].rows[1]} if one[0].rows else None,
        "numbers": _spread([sum(map(_sent, leaves)) for leaves in by_client]),
        "bytes": _spread([sum(_sent(leaf) * leaf.tensor.element_size() for leaf in leaves) for leaves in by_client]),
        "seen": seen,
    }


def _spread(values: Sequence[int]) -> dict[str, float]:
    """The size for all clients of a round, and for the whole run."""
    return {"min": min(values), "mean": sum(values) / len(values), "max": max(values), "round": sum(values)}


def cover(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """The shortest prefixes that cover these names and none of the others."""
    found: dict[str, None] = {}
    for name in names:
        words = name.split(".")
        starts = (".".join(words[:depth]) + "." for depth in range(1, len(words)))
        free = (f"{start}*" for start in starts if not any(other.startswith(start) for other in others))
        found[next(free, name)] = None
    return list(found)


def names_in(messages: Iterable[ClientMessage]) -> set[str]:
    return {leaf.path[-1] for message in messages for leaf in message.leaves if leaf.path}


SINGLY = "seen singly, then summed"  # of a Mean, where nothing hides it
ALONE = "seen singly, used singly"  # of an Each


def least_summed(experiment: Experiment) -> int:
    """The smallest number of clients over which the server learns a sum; 0: it sees every upload by itself."""
    return needed(experiment.privacy.threshold, len(draw_cohort(experiment, 0))) if experiment.privacy.secure_sum else 0


def seen_words(experiment: Experiment, each: bool = False) -> str:
    """How the server sees an array of an upload."""
    privacy = experiment.privacy
    noised = f"noised, epsilon {privacy.epsilon:g} for the run"
    if least := least_summed(experiment):
        summed = f"only in the sum over at least {least} clients"
        shares = f"{noised} (by shares of {least - privacy.dishonest} of them)"
        if privacy.noisy_steps:
            return f"{summed}: models noised (by each client's steps), class sums {shares}"
        return f"{summed}, {shares}" if privacy.noisy else summed
    if privacy.noisy and privacy.where == "client":
        return f"singly, {noised} (by each client)"
    if privacy.noisy_steps:
        return f"singly: models noised (by each client's steps), class sums then summed and {noised} (by the server)"
    if privacy.noisy and not each:
        return f"seen singly, then summed and {noised} (by the server)"
    return ALONE if each else SINGLY


NOT_COVERED = (
    "who takes part in which round is not hidden, and a simulation computes accuracies without noise: they are not "
    "part of the promise"
)


def follows(privacy: Privacy) -> str:
    """How the clip changes, in words; empty if it does not."""
    if not privacy.adaptive:
        return ""
    return (
        f" in the first round, and then to one that follows the length that {privacy.clip_quantile:.0%} of the "
        "clients' values stay below, by a noised count that is paid for with the rest"
    )


def noise_promises(experiment: Experiment) -> list[str]:
    """What is promised about a run's releases, and against whom."""
    privacy = experiment.privacy
    whom = "any single client with all its samples" if privacy.unit == "client" else "any single sample"
    promise = (
        f"what is released in the whole run hides {whom}: epsilon {privacy.epsilon:g}, delta {privacy.delta:g}, "
        f"each cut to a length of {privacy.clip:g}{follows(privacy)}"
    )
    who = "each upload is noised before it leaves its client, so this holds against the server too"
    if privacy.where == "server":
        what = "class sum" if privacy.noisy_steps else "upload"
        who = (
            f"the server sees every {what} without noise and adds it afterwards: this holds against the other clients "
            "and anyone who gets the result, not against the server"
        )
    if privacy.where == "sum":
        honest = least_summed(experiment) - privacy.dishonest
        noise = "class sums' noise" if privacy.noisy_steps else "noise"
        who = (
            f"each client adds a share of the {noise} under the secure sum, "
            f"and the shares of {honest} are enough: this "
            f"holds against the server too, if at most {privacy.dishonest} of the clients in a sum tell it their shares"
        )
    steps = (
        "local training is DP-SGD: each step adds noise to the sum of its samples' clipped gradients, so that models "
        "may be sent and kept as they are; class sums get noise of their own",
    )
    if privacy.worth:
        steps = (
            f"each client chooses {privacy.worth:.0%} of the dimensions, those that tell its classes apart best, which "
            "get less noise than the others; the choice has noise of its own and is paid for",
        )
    withheld = "numbers of samples and training losses are not released"
    return [promise, *(steps if privacy.noisy_steps or privacy.worth else ()), who, withheld, NOT_COVERED]


def beside_uploads(privacy: Privacy) -> str:
    """What each client of a federation tells the server outside its uploads, in words; empty if this experiment is for
    simulations."""
    joins = "the name of its model and the shape of its samples"
    many = "how many training and test samples it has, "
    if privacy.noisy:
        alone = privacy.where == "server" or privacy.noisy_steps
        return (
            "" if alone else f"each client also tells {joins}. It tells no loss, no number of samples, no test result"
        )
    if privacy.secure_sum:
        return f"each client also tells {many}{joins}. Its loss is in the sum, and its test results stay with it"
    right = "of each class how many test samples it has and how many were right"
    return f"each client also tells its mean training loss, {many}{joins}; when it is tested, {right}"


def learns(up: Sequence[ClientMessage], least: int = 0) -> Iterator[str]:
    """What the server can tell from the uploads, in words; `least`: it learns only sums of this many clients or
    more."""
    leaves = [leaf for message in up for leaf in message.leaves]
    if not leaves:
        yield "nothing: clients send no message"
    several = f"the sum over the {len(up)} clients of a round" if len(up) > 1 else "of the round's only client"
    if summed := [leaf for leaf in leaves if not leaf.each]:
        yield from _read(summed, several, "about these clients together")
        yield (
            "nothing about a single client from its upload: it is masked, and no sum of fewer than "
            f"{least} clients can be opened"
            if least
            else "the same about each client: it receives every upload singly, before it sums them. "
            "privacy.secure_sum = true hides single uploads from it"
        )
    if single := [leaf for leaf in leaves if leaf.each]:
        yield from _read(single, "of each single client", "about each single client")
        yield "the server may pass on one client's values to other clients: see what goes down"


def _read(leaves: Sequence[Leaf], values_of: str, weights_of: str) -> Iterator[str]:
    """What can be read from values and from weights."""
    if names := dict.fromkeys(_place(leaf).name for leaf in leaves if not leaf.weight and leaf.tensor.numel()):
        yield f"{values_of}: {', '.join(names)}"
    weights = [leaf for leaf in leaves if leaf.weight]
    for path in dict.fromkeys(leaf.path for leaf in weights):
        if told := _told([leaf for leaf in weights if leaf.path == path]):
            yield f"{weights_of}: {told}"


def _told(weights: Sequence[Leaf]) -> str:
    """What the weights of a Mean reveal, if anything."""
    one = weights[0]
    counts = any(bool(((w.tensor != 0) & (w.tensor != 1)).any()) for w in weights)  # else all clients count equally
    if one.rows is None:
        return f"the number of training samples (the count sent with {_place(one).name})" if counts else ""
    rows = f"(rows of {_place(one).name})"
    if one.each:
        return f"which classes it holds{', and how many samples of each' if counts else ''} {rows}"
    return f"how many {'samples there are of each class' if counts else 'hold each class'} {rows}"


def one_step(
    experiment: Experiment, engine: ReferenceEngine, number: int, batches: Sequence[Batch], down: Tree
) -> Update:
    """A client's first round with these batches instead of its epochs: a message's size does not depend on them."""
    return local_update(
        experiment.method,
        engine.model(number),
        experiment.scheduled,
        engine.client(experiment.method, number),
        engine.federation.local(number, 0),
        lambda epoch: batches,
        down,
        experiment.scheduled.rate(0),
        local_epochs=1,
    )


def example_batch(federation: Federation, number: int, epoch: int) -> Batch:
    """A sample of every class that the client trains on in this epoch; two of a single class, for BatchNorm."""
    whole = Batch(*map(torch.cat, zip(*federation.epoch(number, 0, epoch), strict=True)))
    first = [int((whole.y == label).nonzero()[0]) for label in torch.unique(whole.y)]
    rows = first if len(first) > 1 else list(range(min(2, len(whole.y))))
    return Batch(whole.x[rows], whole.y[rows], whole.mask[rows])
