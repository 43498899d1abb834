"""What leaves the building: rows that are withheld, and an exact account of the rest."""

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from protofed.engines.reference import ReferenceEngine
from protofed.engines.wire import measure
from protofed.experiment import Experiment
from protofed.explain import few
from protofed.federation.settings import ClientSettings
from protofed.local import local_update
from protofed.messages import Leaf, learns, leaves
from protofed.messages import Message as Listed
from protofed.method import Each, Mean, Tree
from protofed.ops.trees import map_nodes
from protofed.prepare import draw_cohort


def withhold(up: Tree, counts: Tensor, least: int) -> Tree:
    """The same upload, in which classes with fewer samples (C,) than `least` weigh nothing.

    That is every Mean with weights by class: rows of prototypes, also of several of a class. A model's parameters have
    one weight for all: they are no rows of classes.
    """
    if least <= 1:
        return up
    few_of = counts < least

    def hide(node: Any) -> Any:
        if isinstance(node, Each):
            return Each(map_nodes(hide, node.rows))
        if not isinstance(node, Mean) or node.weight.ndim == 0 or len(node.weight) != len(counts):
            return node
        return Mean(tree_map(lambda t: _zero(t, few_of), node.total), _zero(node.weight, few_of))

    return map_nodes(hide, up)


def _zero(tensor: Tensor, rows: Tensor) -> Tensor:
    return tensor.masked_fill(rows.reshape(-1, *[1] * (tensor.ndim - 1)), 0)


def describe(
    experiment: Experiment, settings: ClientSettings, engine: ReferenceEngine, down: Tree, min_count: int
) -> str:
    """What this client sends, counted on its own data after one training step."""
    number, federation, method = settings.number, engine.federation, experiment.method
    batch = few(federation, number, 0) if federation.used(number) else None
    up = local_update(
        method,
        engine.model(number),
        experiment.optimizer,
        engine.client(method, number),
        federation.local(number, 0),
        lambda epoch: [] if batch is None else [batch],
        down,
        experiment.optimizer.rate(0),
        local_epochs=1,
    ).up
    up = withhold(up, federation.counts[number], min_count)
    message = Listed(list(leaves(up)), measure(up))
    name = settings.name or f"client {number}"
    lines = [f"What {name} sends to {settings.server or 'the server'}:", "", "In every round:"]
    lines += _tensors(message.leaves) or ["  nothing"]
    lines += [f"  in all {message.size.bytes:,} bytes, and its mean training loss"]
    cohort = len(draw_cohort(experiment, 0))
    lines += ["", f"From that the server learns, if all {cohort} clients of a round answer and send alike:"]
    lines += [f"  - {text}" for text in learns([message] * cohort)]
    lines += ["", *_beside(experiment, engine, number)]
    if min_count > 1:
        hidden = int(((federation.counts[number] > 0) & (federation.counts[number] < min_count)).sum())
        lines += [f"Withheld (--min-count {min_count}): the rows of {hidden} classes with fewer samples than that."]
    lines += ["Every sample and its label, and all of its model that is not listed above, stay here."]
    return "\n".join(lines)


def _tensors(listed: list[Leaf]) -> list[str]:
    """One line for each array; a model's many are one line for each part."""
    groups: dict[tuple[str, str], list[Leaf]] = {}
    for leaf in listed:
        words = [*leaf.path] or ["prototypes" if leaf.rows else "numbers"]
        single = leaf.weight or len(words) < 2 or words[-2] not in ("params", "buffers")
        name = "/".join(words) if single else "/".join([*words[:-1], words[-1].split(".")[0] + ".*"])
        groups.setdefault((name + (" (counts)" if leaf.weight else ""), str(leaf.each)), []).append(leaf)
    return [_line(name, some) for (name, _), some in groups.items()]


def _line(name: str, some: list[Leaf]) -> str:
    one = some[0]
    kind = str(one.tensor.dtype).removeprefix("torch.")
    shape = f"{kind} {tuple(one.tensor.shape)}" if len(some) == 1 else f"{kind}, {len(some)} arrays"
    share = one.rows[0] / one.rows[1] if one.rows else 1
    size = sum(round(leaf.tensor.numel() * leaf.tensor.element_size() * share) for leaf in some)
    rows = f", {one.rows[0]} of {one.rows[1]} rows" if one.rows else ""
    seen = "used client by client" if one.each else "used only summed over clients"
    return f"  {name}: {shape}{rows}, {size:,} bytes; {seen}"


def _beside(experiment: Experiment, engine: ReferenceEngine, number: int) -> list[str]:
    """All that is sent but no upload."""
    counts = int(engine.federation.counts[number].sum())
    tests = len(engine.federation.test(number).y)
    lines = [
        "When it joins: its number and name, the model's name and fields, the shape of its samples, how many it has "
        f"({counts} to train on, {tests} to test with), and the version of protofed.",
    ]
    own = experiment.evaluate.own
    when = "" if not own else "every round and " if own == 1 else f"every {own} rounds and "
    lines += [
        f"When it is tested ({when}after the last round): of each class how many test samples it has and how many were "
        "right"
        + ("; after the last round also which class was taken for which." if experiment.record.enabled else "."),
    ]
    return lines
