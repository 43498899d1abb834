"""Rules about what travels: its form, that it arrives unchanged, and that it contains nothing private."""

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from protofed.engines.wire import decode, encode
from protofed.method import Tree
from protofed.ops.trees import deal, is_node, under
from protofed.testing.broken import Broken, require, require_same
from protofed.testing.trees import floats, keys, leaked, leaves, readable_numbers
from protofed.testing.trial import COHORT, Trial


def uploads(trial: Trial) -> None:
    """An upload is a tree of Mean and Each, of the same form for every client."""
    method, forms = trial.method, dict[int, Tree]()
    method.check([trial.spec()])
    down = method.broadcast(method.init_server(trial.spec()), torch.tensor(COHORT))
    for row, number in enumerate(COHORT):
        up = trial.update(number, trial.new(number), 0, deal(down, row)).up
        for path, node in tree_flatten_with_path(up, is_leaf=is_node)[0]:
            require(
                is_node(node),
                f"up{keystr(path)} is {type(node).__name__}",
                "Say what the server learns of it: a Mean is only seen summed over clients, an Each one by one.",
            )
        for place, leaf in leaves(up).items():
            require(isinstance(leaf, Tensor), f"up{place} is {type(leaf).__name__}", "Only tensors travel.")
        forms[number] = tree_map(torch.zeros_like, up)
        require_same(
            forms[number],
            forms[COHORT[0]],
            0,
            f"up of client {number} against client {COHORT[0]}, ",
            "Give absent classes rows of weight 0, not other keys and shapes.",
        )


def serialisation(trial: Trial) -> None:
    """Whatever travels or is saved comes back unchanged."""
    remedy = "Keep tensors in dicts (by strings), lists, tuples, Mean, Each and Client; rows of weight 0 hold zeros."
    for round in trial.rounds:
        down = trial.method.broadcast(round.server, torch.tensor(COHORT))
        trees = {"server before a round": round.server, "server after a round": round.after, "down": down}
        for number, update in round.updates.items():
            trees[f"down to client {number}"] = round.downs[number]
            trees[f"up of client {number}"] = update.up
            trees[f"client {number} before a round"] = round.clients[number]
            trees[f"client {number} after a round"] = update.client
        for name, tree in trees.items():
            try:
                back = decode(encode(tree))
            except (TypeError, ValueError) as error:
                raise Broken(f"{name}: {error}. {remedy}") from error
            require_same(back, tree, 0, name, remedy)
        received = {i: update._replace(up=decode(encode(update.up))) for i, update in round.updates.items()}
        require_same(trial.aggregate(round.server, received), round.after, 0, "of uploads that came back, ", remedy)


def privacy(trial: Trial) -> None:
    """What is private is in no upload, neither by name nor by value.

    By value means the numbers themselves, or times a Mean's weight; a private tensor that is changed before it is sent,
    say doubled, is not recognised. A client's memory is private, but for what it keeps under the name that it sends it
    under.
    """
    last = trial.rounds[-1]  # in the first round, copies of common initial weights may still be alike
    for number, update in last.updates.items():
        sent, seen, params = keys(update.up), readable_numbers(update.up), update.client.params
        where = f"in the upload of client {number}"
        for prefix in trial.private:
            claimed = under(params, prefix)
            require(bool(claimed), f"private = {prefix!r} names no parameter", f"There are: {', '.join(params)}.")
            named = sorted(claimed.keys() & sent)
            require(not named, f"{', '.join(named)} is {where}", f"Leave {prefix!r} out of it.")
        for name, value in params.items():
            found = name not in sent and leaked(value, seen)
            remedy = "Do not send it; or, if it is not private, send it under its name."
            require(not found, f"the numbers of {name} are {where}", remedy)
        shared = readable_numbers({name: value for name, value in params.items() if name in sent})
        for memory in (last.clients[number].memory, update.client.memory):
            for place, value in floats(memory).items():
                copy = leaked(value, shared) or any(f"['{name}']" in place for name in sent)  # of what is shared
                found = leaked(value, seen) and not copy
                remedy = "Do not send them; or, if they are not private, keep them under the name of what is sent."
                require(not found, f"the numbers of memory{place} are {where}", remedy)
        for x in trial.samples(number).x:
            require(not leaked(x, seen), f"a sample is {where}", "Do not send inputs.")
