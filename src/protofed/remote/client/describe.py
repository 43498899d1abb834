"""An exact account of what a client sends, before it joins."""

from protofed.config.experiment import Experiment
from protofed.config.registry import ModelChoice
from protofed.engines.reference import ReferenceEngine
from protofed.engines.wire import encoded_size
from protofed.explain.messages import ClientMessage as Listed
from protofed.explain.messages import (
    Leaf,
    example_batch,
    learns,
    least_summed,
    message_tensors,
    noise_promises,
    one_step,
    seen_words,
)
from protofed.method import Tree
from protofed.remote.client.leaving import withhold
from protofed.remote.settings import ClientSettings
from protofed.runs.cohort import draw_cohort
from protofed.runs.noised import layout_around


def describe_upload(
    experiment: Experiment, settings: ClientSettings, engine: ReferenceEngine, down: Tree, min_count: int
) -> str:
    """What this client sends, counted on its own data after one training step."""
    number, federation = settings.number, engine.federation
    batches = [example_batch(federation, number, 0)] if federation.used(number) else []
    up = withhold(one_step(experiment, engine, number, batches, down).up, federation.counts[number], min_count)
    packed = up
    if experiment.privacy.noisy:  # all rows are sent, as one vector
        layout = layout_around(experiment, engine, number, engine.specs()[0], down)
        up, packed = layout.sent(), layout.packed()
    message = Listed(list(message_tensors(up)), encoded_size(up))
    name = settings.name or f"client {number}"
    lines = [f"What {name} sends to {settings.server or 'the server'}:", "", "In every round:"]
    lines += _tensors(experiment, message.leaves) or ["  nothing"]
    cohort, least = len(draw_cohort(experiment, 0)), least_summed(experiment)
    lines += [_masked(experiment, packed, cohort) if least else _plain(experiment, message.size.bytes)]
    if experiment.privacy.noisy:
        lines += ["", "What that is worth:", *(f"  - {text}" for text in noise_promises(experiment))]
    else:
        lines += ["", f"From that the server learns, if all {cohort} clients of a round answer and send alike:"]
        lines += [f"  - {text}" for text in learns([message] * cohort, least)]
    lines += ["", *_beside(experiment, engine, number)]
    if min_count > 1:
        hidden = int(((federation.counts[number] > 0) & (federation.counts[number] < min_count)).sum())
        lines += [f"Withheld (--min-count {min_count}): the rows of {hidden} classes with fewer samples than that."]
    lines += ["Every sample and its label, and all of its model that is not listed above, stay here."]
    return "\n".join(lines)


def about_embeddings(choice: ModelChoice, engine: ReferenceEngine, number: int) -> str:
    """What a frozen encoder made of the client's data before anything was trained; empty without one."""
    if not choice.frozen:
        return ""
    many = len(engine.federation.train(number).y) + len(engine.federation.test(number).y)
    return (
        f"\n{choice.name} is frozen: it embedded all {many:,} samples once, on this machine. Everything above is made "
        f"from their embeddings ({choice.encoder_width:,} numbers each), which stay here, too."
    )


def _plain(experiment: Experiment, size: int) -> str:
    privacy = experiment.privacy
    if privacy.noisy:
        return f"  in all about {size:,} bytes: {_cut(experiment)} and noised before they are sent. No loss is sent"
    return f"  in all {size:,} bytes, and its mean training loss, seen singly"


def _masked(experiment: Experiment, up: Tree, cohort: int) -> str:
    """What is sent in place of these arrays where they are summed under masks."""
    from protofed.privacy.simulated import sizes_of  # needs the packages of secure sums

    privacy = experiment.privacy
    vector, keys = sizes_of(privacy, up, cohort, loss=not privacy.noisy)
    what, values = "all of it, and its mean training loss", f"values from -{privacy.range:g} to {privacy.range:g}"
    if privacy.noisy:
        what, values = f"all of it, {_cut(experiment)} and noised", "no loss"
    return (
        f"  {what}, as {vector:,} bytes of masked numbers ({privacy.bits} bits each, {values}), "
        f"with {keys:,} bytes of keys and shares"
    )


def _cut(experiment: Experiment) -> str:
    """How an upload is bounded before it is noised."""
    privacy = experiment.privacy
    if privacy.unit == "client":
        return f"cut to a length of {privacy.clip:g}"
    kept = f", their sums cut to {privacy.range:g}" if privacy.secure_sum else ""
    return f"sums over samples, each cut to a length of {privacy.clip:g}{kept},"


def _tensors(experiment: Experiment, listed: list[Leaf]) -> list[str]:
    """One line for each array; a model's many are one line for each part."""
    groups: dict[tuple[str, str], list[Leaf]] = {}
    for leaf in listed:
        words = [*leaf.path] or ["prototypes" if leaf.rows else "numbers"]
        single = leaf.weight or len(words) < 2 or words[-2] not in ("params", "buffers")
        name = "/".join(words) if single else "/".join([*words[:-1], words[-1].split(".")[0] + ".*"])
        groups.setdefault((name + (" (counts)" if leaf.weight else ""), str(leaf.each)), []).append(leaf)
    return [_line(name, some, seen_words(experiment, some[0].each)) for (name, _), some in groups.items()]


def _line(name: str, some: list[Leaf], seen: str) -> str:
    one = some[0]
    kind = str(one.tensor.dtype).removeprefix("torch.")
    shape = f"{kind} {tuple(one.tensor.shape)}" if len(some) == 1 else f"{kind}, {len(some)} arrays"
    share = one.rows[0] / one.rows[1] if one.rows else 1
    size = sum(round(leaf.tensor.numel() * leaf.tensor.element_size() * share) for leaf in some)
    rows = f", {one.rows[0]} of {one.rows[1]} rows" if one.rows else ""
    return f"  {name}: {shape}{rows}, {size:,} bytes; {seen}"


def _beside(experiment: Experiment, engine: ReferenceEngine, number: int) -> list[str]:
    """All that is sent but no upload."""
    counts = int(engine.federation.counts[number].sum())
    tests = len(engine.federation.test(number).y)
    many = f"how many it has ({counts} to train on, {tests} to test with), "
    if experiment.privacy.noisy:
        many = ""
    lines = [
        f"When it joins: its number and name, the model's name and fields, the shape of its samples, {many}and the "
        "version of protofed.",
    ]
    if experiment.privacy.noisy:
        return [*lines, "It tells no results of its tests, and not how many samples it has (its privacy budget)."]
    if experiment.privacy.secure_sum:
        return [*lines, "It tells no results of its tests: they are of one client (privacy.secure_sum)."]
    own = experiment.evaluate.own
    when = "" if not own else "every round and " if own == 1 else f"every {own} rounds and "
    lines += [
        f"When it is tested ({when}after the last round): of each class how many test samples it has and how many were "
        "right"
        + ("; after the last round also which class was taken for which." if experiment.record.enabled else "."),
    ]
    return lines
