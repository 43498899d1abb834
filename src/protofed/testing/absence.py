"""Rules about what is missing: classes that nobody holds, and clients without samples."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from protofed.method import Client, Mean, Tree
from protofed.ops.trees import deal, map_nodes
from protofed.testing.broken import require, require_finite, require_same
from protofed.testing.trees import floats, keys, means, names_on, under_names
from protofed.testing.trial import CLASSES, COHORT, DIM, EMPTY, NOBODYS, Trial


def absent(trial: Trial) -> None:
    """Absent classes do no harm: all stays finite, and a prototype of a class that nobody holds is not made up.

    Taken for prototypes: what has a "proto" score, and what the server keeps as `of_nobodys` says.
    """
    method, last = trial.method, trial.rounds[-1]
    remedy = "An absent class has weight 0: use Mean.value, Mean.otherwise, or clamp what you divide by."
    for where, rounds in {
        "with classes that nobody holds": trial.rounds,
        "with one client, which has one sample": trial.play((1,), (1,)),
        "with one client, which has one class": trial.play((2,), (2,)),
        "in a round that misses classes of the one before": [trial.round(last.after, {}, (2,), 2)],
    }.items():
        for round in rounds:
            require_finite(round.updates, f"{where}, client", remedy)
            require_finite(round.after, f"{where}, server", remedy)

    remedy = "Give a class that a client does not hold weight 0, and keep what was where the sum of weights is 0."
    for number, update in last.updates.items():
        missing = trial.local(number, 1).counts == 0
        for mean in means(update.up):
            if list(mean.weight.shape).count(CLASSES) == 1:
                by_class = mean.weight.movedim(mean.weight.shape.index(CLASSES), 0)
                none = not bool(by_class[missing].any())
                require(none, f"client {number} sends weight for a class that it does not hold", remedy)
    first = trial.rounds[0].server
    old, new = of_nobodys(first, trial.new(0)), of_nobodys(last.after, trial.new(0))
    for place, rows in new.items():
        was = old[place] if place in old and old[place].shape == rows.shape else torch.zeros_like(rows)
        require_same(rows, was, 1e-6, f"for a class that nobody ever held, server{place}", remedy)
    if "proto" in method.scores:
        x, client = trial.samples(0).x, last.updates[0].client
        started, now = (
            method.predict(trial.model, client, x, trial.down(server, 0))["proto"][:, NOBODYS]
            for server in (first, last.after)
        )
        unknown = bool((now[started == -torch.inf] == -torch.inf).all())
        require(unknown, "for a class that nobody ever held, the 'proto' score is not -inf any more", remedy)


def of_nobodys(server: Tree, client: Client) -> dict[str, Tensor]:
    """What the server keeps of classes without a sample, by place.

    That is, of every tensor under no name of a client's parameters that has an axis of classes and one of embeddings,
    and of the weights of Means that have an axis of classes.
    """
    found, models = {}, client.params.keys() | client.buffers.keys()
    for path, leaf in tree_flatten_with_path(server)[0]:
        place, shape = keystr(path), list(getattr(leaf, "shape", ()))
        if shape.count(CLASSES) == 1 and (DIM in shape or place.endswith(".weight")) and not names_on(path) & models:
            found[place] = leaf.index_select(shape.index(CLASSES), torch.tensor(NOBODYS))
    return found


def empty(trial: Trial) -> None:
    """A client without samples does no harm.

    Its Means weigh nothing, and what the server makes of models, under a parameter's name, is the same without it. The
    rest may depend on how many took part; it must stay finite. A cohort of such clients alone leaves the server's
    numbers as they were, but for what a Mean forgets (weight 0).
    """
    remedy = "Weight what is sent by data.counts, which is 0 here, and keep the old value where the weight is 0."
    for number, round in enumerate(trial.rounds):
        down = deal(trial.method.broadcast(round.server, torch.tensor((*COHORT, EMPTY))), len(COHORT))
        update = trial.update(EMPTY, trial.new(EMPTY), number, down)
        require_finite(update, "of an empty client, ", remedy)
        for mean in means(update.up):
            nothing = not any(bool(leaf.any()) for leaf in tree_leaves(mean))
            require(nothing, "an empty client's Mean has a weight or a total other than 0", remedy)
        after = trial.aggregate(round.server, round.updates | {EMPTY: update})
        require_finite(after, "with an empty client, server", remedy)
        averaged = keys(update.up) & keys(update.client)
        with_it, without = (under_names(server, averaged) for server in (after, round.after))
        require_same(with_it, without, 1e-5, "with an empty client and without it, server", remedy)

        only = trial.round(round.after, {}, (EMPTY,), number + 1).after
        require_finite(only, "with empty clients only, server", remedy)
        now, was = (floats(remembered(server, only)) for server in (only, round.after))
        require_same(now, was, 1e-6, "with empty clients only, server", remedy)
        finished = trial.finish(EMPTY, update.client, round.after)
        require_finite(finished, "of an empty client after the last phases, ", remedy)


def remembered(tree: Tree, now: Tree) -> Tree:
    """The tree without the rows of its Means that now have weight 0."""

    def keep(node: Any, other: Any) -> Any:
        if not isinstance(node, Mean):
            return node
        if not bool(other.weight.any()):
            return ()
        known = (other.weight > 0).to(node.weight.dtype)
        return Mean(Mean.of(node.total, known).total, node.weight * known)

    return map_nodes(keep, tree, now)
