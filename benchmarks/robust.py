"""Measures robust rules against attackers on the 8x8 digits: docs/robust.json, and the tables of docs/robust.md.

    python benchmarks/robust.py [--minutes M]     measure what is missing, the most informative cells first
    python benchmarks/robust.py --write           only write the tables

One process, resumable: every cell is kept as soon as it is measured.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from protofed import Experiment
from protofed.atomic import write_atomically
from protofed.engines import Engine
from protofed.method import Mean
from protofed.metrics import global_numbers, mean_accuracy, own_numbers
from protofed.robust.poison import TRIGGERED
from protofed.runs.loop import uploads_of
from protofed.runs.measured_clients import honest_of
from protofed.runs.setup import draw_cohort, prepare, torch_settings

DOCS = Path(__file__).resolve().parent.parent / "docs"
TITLES = {"fedproto": "FedProto", "fednh": "FedNH", "fedavg": "FedAvg", "fedpr": "FedPR"}
METHODS = tuple(TITLES)
RULES = ("none", "clip", "centred_clip", "median", "trimmed", "geometric_median", "krum", "multi_krum")
ATTACKS = ("sign_flip", "scale", "noise", "swap", "collude", "label_flip", "backdoor")
SEEDS = (0, 1, 2)
SHARES = (0.2, 0.3, 0.1)  # of the clients, in the order of measuring
SETTING = (
    "clients=20", "rounds=20", "local_epochs=1", "batch_size=16", "model=mlp_digits", "partition=dirichlet",
    "partition.alpha=0.5", "optimizer.lr=0.1", "optimizer.momentum=0.5", "engine=stacked", "engine.threads=1",
    "engine.compile=never", "device=cpu",
)  # fmt: skip
OWN = {"fedproto": ("method.inference=proto", "method.candidates=all", "method.init=common")}
FAR = 1000  # what the smallest site multiplies its upload by
Cell = tuple[str, str, str, float, str, int]  # method, attack, rule, share, who, seed


def cells() -> Iterator[Cell]:
    """All cells, the most informative first; neighbours train on the same samples where possible."""
    for seed in SEEDS:
        for m in METHODS:
            yield from ((m, "none", r, 0.0, "any", seed) for r in RULES)
            yield from ((m, "scale", r, 0.05, "smallest", seed) for r in RULES)
    blocks = [(0.2, 0), (0.3, 0), (0.1, 0)]  # all shares with one seed, then the other seeds
    for share, seed in blocks + [(share, seed) for share, _ in blocks for seed in SEEDS[1:]]:
        for m in METHODS:
            yield from ((m, a, r, share, "any", seed) for a in ATTACKS for r in RULES)
            yield m, "backdoor", "none", 0.0, "any", seed  # how often the trigger alone misleads


def plan(cell: Cell) -> Experiment:
    method, attack, rule, share, who, seed = cell
    return Experiment.load(
        "demo", f"method={method}", *SETTING, *OWN.get(method, ()), f"seed={seed}", f"robust.rule={rule}",
        f"attack.kind={attack}", f"attack.share={share}", f"attack.who={who}",
        *([f"attack.factor={FAR}"] if who == "smallest" else []),
    )  # fmt: skip


_engines: dict[Any, Any] = {}  # the last one: cells that train on the same samples share it, and its traced steps


def engine_of(cell: Cell) -> Engine:
    """An engine whose uploads come one row a client, as robust rules want them."""
    method, attack, _, share, _, seed = cell
    trains_on = (attack, share) if attack in ("label_flip", "backdoor") else ()
    key = (method, seed, trains_on)
    if key not in _engines:
        _engines.clear()
        _engines[key] = prepare(plan((*cell[:2], "median", *cell[3:])), cores=1).engine
    engine: Engine = _engines[key]
    engine.clients = {}
    return engine


def measured(cell: Cell) -> dict[str, Any]:
    """Accuracy after the last round: of the global model on the global test set, and of own models on own test sets."""
    experiment = plan(cell)
    engine, method = engine_of(cell), experiment.method
    uploads, centres = uploads_of(experiment, engine), dict[str, Mean]()
    server = method.init_server(engine.specs()[0])
    cohort = draw_cohort(experiment, 0)  # all of them
    with torch_settings(engine.in_turn, experiment.engine.threads, experiment.engine.precision):
        for round in range(experiment.rounds):
            trained = engine.train(method, server, cohort, round)
            if not bool(trained.finite.all()):
                return {"diverged": round + 1}
            up, centres = uploads.together(trained.up, cohort, round, centres)
            server = method.aggregate(server, up, torch.tensor(cohort))
            engine.clients.update(trained.clients)
        honest = honest_of(experiment, engine, cohort)
        own = own_numbers(method, engine.evaluate(method, server, honest, on="own", who="personal"))
        whole = global_numbers(method, engine.global_tally(method, server))
        found = {"own": own["accuracy_mean"], "global": whole["global_accuracy"]}
        if cell[1] == "backdoor":
            tallies = engine.evaluate(method, server, honest, on=TRIGGERED, who="personal")
            found["attack_success"] = mean_accuracy(method, tallies)
        if cell[4] == "smallest":
            sizes = engine.samples(range(experiment.clients))
            found["samples"] = sum(sizes[n] for n in uploads.attackers) / sum(sizes)
    return found


def name(cell: Cell) -> str:
    return "/".join(map(str, cell))


GUESS = 0.1  # what a run counts as that ended because its numbers overflowed: the share of right guesses
START, END = "<!-- measured by benchmarks/robust.py -->\n", "<!-- end of what is measured -->\n"
Kept = dict[str, dict[str, Any]]


def accuracies(kept: Kept, *cell: Any) -> list[float]:
    """One for each seed that is measured: of the global model, for FedProto of own models on own test sets."""
    found = [kept[name((*cell, seed))] for seed in SEEDS if name((*cell, seed)) in kept]
    key = "own" if cell[0] == "fedproto" else "global"
    return [GUESS if "diverged" in one else one[key] for one in found]


def successes(kept: Kept, *cell: Any) -> list[float]:
    found = [kept.get(name((*cell, seed)), {}) for seed in SEEDS]
    return [one["attack_success"] for one in found if "attack_success" in one]


def shown(values: Sequence[float]) -> str:
    """Mean and deviation over seeds, in percent."""
    if not values:
        return "-"
    few = "" if len(values) == len(SEEDS) else f" ({len(values)} of {len(SEEDS)} seeds)"
    return f"{100 * statistics.mean(values):.1f} ± {100 * statistics.pstdev(values):.1f}{few}"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    lines = [f"| {' | '.join(titles)} |", "|---|" + "---:|" * (len(titles) - 1)]
    return [indent + line for line in [*lines, *(f"| {' | '.join(row)} |" for row in rows)]] + [""]


def over_attacks(kept: Kept, method: str, rule: str, worst: bool) -> str:
    """In percent, without an attack and at each share: the mean over attacks, or the worst."""
    shares = []
    for share in sorted(SHARES):
        means = [accuracies(kept, method, attack, rule, share, "any") for attack in ATTACKS]
        each = [statistics.mean(values) for values in means if values]
        whole = len(each) == len(ATTACKS)
        shares.append(f"{100 * (min(each) if worst else statistics.mean(each)):.0f}" if whole else "-")
    alone = accuracies(kept, method, "none", rule, 0.0, "any")
    return " / ".join([f"{100 * statistics.mean(alone):.0f}" if alone else "-", *shares])


def of_share(kept: Kept, share: float, indent: str) -> list[str]:
    """A table for each method: rules against attacks."""
    lines = []
    for method in METHODS:
        alone = successes(kept, method, "backdoor", "none", 0.0, "any")
        title = f"**{TITLES[method]}**, {round(100 * share)} % attackers"
        lines += [f"{indent}{title} (the trigger alone misleads in {shown(alone)} %)", ""]
        rows = [
            [
                f"`{rule}`",
                shown(accuracies(kept, method, "none", rule, 0.0, "any")),
                *(shown(accuracies(kept, method, attack, rule, share, "any")) for attack in ATTACKS),
                shown(successes(kept, method, "backdoor", rule, share, "any")),
            ]
            for rule in RULES
        ]
        lines += table(["rule", "no attack", *(f"`{attack}`" for attack in ATTACKS), "backdoor success"], rows, indent)
    return lines


def write(kept: Kept) -> None:
    """The tables of docs/robust.md, between two marks."""
    titles = ["rule", *(TITLES[method] for method in METHODS)]
    every = list(dict.fromkeys(cells()))
    missing = [cell for cell in every if name(cell) not in kept]
    lines = [f"{len(every) - len(missing)} of {len(every)} cells are measured."]
    if missing:
        many = Counter(f"{round(100 * cell[3])} % attackers, seed {cell[5]}" for cell in missing)
        lines[0] += " Missing: " + "; ".join(f"{count} at {what}" for what, count in many.items()) + "."
    for worst, text in ((False, "Mean over the seven attacks"), (True, "The worst of the seven attacks")):
        lines += [
            "",
            f"**{text}**, in percent: no attack / {' / '.join(f'{100 * s:.0f} %' for s in sorted(SHARES))}",
            "",
        ]
        lines += table(titles, [[f"`{r}`", *(over_attacks(kept, m, r, worst) for m in METHODS)] for r in RULES])
    sites = {kept[n]["samples"] for n in map(name, every) if "samples" in kept.get(n, {})}
    part = f"{100 * min(sites):.1f} to {100 * max(sites):.1f} %" if sites else "a small part"
    lines += [f"**The smallest site**, with {part} of the samples, multiplies its upload by {FAR}", ""]
    small = [[f"`{r}`", *(shown(accuracies(kept, m, "scale", r, 0.05, "smallest")) for m in METHODS)] for r in RULES]
    lines += table(titles, small)
    for share in SHARES:
        first = share == SHARES[0]
        lines += ([] if first else [f'??? note "{100 * share:.0f} % attackers"', ""]) + of_share(
            kept, share, "" if first else "    "
        )
    page = DOCS / "robust.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{START}\n" + "\n".join(lines).rstrip() + f"\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many")
    parser.add_argument("--write", action="store_true", help="only write the tables")
    given = parser.parse_args()
    path = DOCS / "robust.json"
    kept: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    until = time.monotonic() + 60 * given.minutes
    for cell in [] if given.write else [cell for cell in dict.fromkeys(cells()) if name(cell) not in kept]:
        if time.monotonic() > until:
            break
        kept[name(cell)] = measured(cell)
        write_atomically(path, (json.dumps(kept, indent=0, sort_keys=True) + "\n").encode())
    write(kept)


if __name__ == "__main__":
    main()
