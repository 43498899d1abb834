"""`protofed attack`: what the uploads of a run tell, measured by attacks on them."""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from protofed.data.batches import Samples
from protofed.engines.resources import torch_settings
from protofed.leaks.audit import audited
from protofed.leaks.encoders import LEAST, Encoder, Whose, World, chosen_clients, encoder_for, largest_classes
from protofed.leaks.inversion import Likely, Likeness, invert, invert_likely, likeness
from protofed.leaks.membership import Background, Guesses
from protofed.leaks.pictures import Tile, draw_shown
from protofed.leaks.shadows import Shadows
from protofed.leaks.uploads import Clients, recomputed, sends_body
from protofed.leaks.views import View, holdings
from protofed.ops import random
from protofed.runs.saved import read_checkpoint
from protofed.runs.setup import prepare

SIZES = (1, 2, 5, 20, 100)
DRAWS = {1: 12, 2: 6, 5: 4, 20: 2, 100: 1}  # how often a class of so many samples is drawn, for membership
INVERTED = 3  # of these draws, for reconstruction
SENT = 0  # stands for the class size of the prototypes as they were sent
FILE, PICTURE = "attack.json", "attack.png"


@dataclasses.dataclass(frozen=True)
class Options:
    """How much is attacked."""

    clients: int = 4
    classes: int = 3
    steps: int = 300
    seed: int = 0
    model: Whose = "own"
    shadows: int = 0  # runs of each client


class Target(NamedTuple):
    """A prototype as the attacker has it, and the samples behind it."""

    client: int
    label: int
    size: int  # SENT: as it was sent
    prototypes: Tensor  # (K, D): several where a method sends several per class
    rows: Tensor  # of the client's training samples


class Attacked(NamedTuple):
    """What came of it."""

    told: dict[str, Any]
    folder: Path
    picture: Path | None


def attack_run(
    run: str | Path,
    options: Options | None = None,
    *,
    data_dir: Path | None = None,
    device: str | None = None,
    trust: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Attacked:
    """Attack the uploads of a run, and write attack.json and attack.png into its folder."""
    options = options or Options()
    saved = read_checkpoint(run, trust, tell, device)
    prepared = prepare(saved.experiment, data_dir)
    engine = prepared.reference
    with torch_settings(True, saved.experiment.engine.threads, "fp32"):
        clients = recomputed(saved, engine)
        for text in clients.notes:
            tell(text)
        view = View(saved, engine, clients, options.seed)
        world = World.of_run(saved, prepared)
        attack = _Attack(world, view, clients, options, tell)
        attack.play()
        up = clients.uploads[clients.numbers[0]]
        frozen = world.raw is not world.data
        told = {
            "method": saved.experiment.method_name,
            "round": saved.state.round,
            "kind": world.kind,
            "seed": options.seed,
            "steps": options.steps,
            "attacked": attack.chosen,
            "view": view.words,
            "singly": view.singly,
            "model": {"whose": options.model, "sent": sends_body(up), "public": frozen},
            "holdings": holdings(view, clients),
            "reconstruction": attack.reconstructed(),
            "membership": attack.found_members(),
            "shadows": _shadows(world, view, clients, options, attack.chosen, tell),
            "epsilon": audited(view, clients, options.seed),
            "notes": clients.notes,
        }
    saved.folder.write_json(FILE, told)
    picture = None
    if attack.shown:
        picture = saved.folder.file(PICTURE)
        draw_shown(attack.shown, picture)
    return Attacked(told, saved.folder.path, picture)


def _shadows(
    world: World, view: View, clients: Clients, options: Options, chosen: list[int], tell: Callable[[str], None]
) -> dict[str, Any] | None:
    """What shadow runs of the chosen clients say of members; None without any."""
    if not options.shadows:
        return None
    runs = Shadows(world, view, clients, options.shadows, options.classes, options.seed, options.model)
    return runs.told(chosen, tell)


class _Attack:
    """One pass over the chosen clients and classes, and what it collects by class size."""

    def __init__(
        self, world: World, view: View, clients: Clients, options: Options, tell: Callable[[str], None]
    ) -> None:
        self.world, self.view, self.clients, self.options, self.tell = world, view, clients, options, tell
        self.chosen = chosen_clients(clients, options.clients, options.seed)
        self.guesses: dict[int, Guesses] = {}
        self.trained: dict[int, Guesses] = {}  # members against other samples that their client trains on
        self.likes: dict[int, list[dict[str, tuple[Likeness, Likeness]]]] = {}
        self.sizes: list[int] = []  # of the prototypes as sent
        self.shown: list[Tile] = []

    def play(self) -> None:
        """Attack every chosen client."""
        for number in self.chosen:
            encoder = encoder_for(self.world.saved, self.world.prepared, self.clients, number, self.options.model)
            counts = self.world.data.counts[number].long().tolist()
            pictured: list[Target] = []
            for label in largest_classes(counts, self.options.classes):
                own, others = self.world.held_out(number, label, self.options.seed)
                if len(own) + len(others) < LEAST:
                    self.tell(f"client {number}, class {label}: too few test samples to attack it, so it is left out")
                    continue
                targets = self._targets(number, label)
                self._membership(encoder, targets, own, others)
                seen = Counter[int]()
                for target in targets:
                    seen[target.size] += 1
                    if seen[target.size] <= INVERTED:
                        pictured.append(target)
            if pictured and self.world.kind != "words":
                self._reconstruct(encoder, pictured)

    def _targets(self, number: int, label: int) -> list[Target]:
        """The prototype as sent, and those that the client would send with fewer samples of the class and no other."""
        rows = self.world.rows_of(number, label)
        train = self.world.data.train(number)
        self.sizes.append(len(rows))
        found = [Target(number, label, SENT, self.view.prototypes(number).of_class(label), rows)]
        for size in (size for size in SIZES if size <= len(rows)):
            for draw in range(DRAWS[size]):
                key = random.key(self.options.seed, "leaks", number, label, size, draw)
                some = rows[random.permutation(key, len(rows))[:size].to(rows.device)]
                seen = self.view.prototypes(number, Samples(train.x[some], train.y[some]))
                found.append(Target(number, label, size, seen.of_class(label), some))
        return [target for target in found if len(target.prototypes)]

    @torch.no_grad()
    def _membership(self, encoder: Encoder, targets: list[Target], own: Tensor, others: Tensor) -> None:
        if not targets:
            return
        number, label = targets[0].client, targets[0].label
        test, train = self.world.test_of(self.world.data, number), self.world.data.train(number)
        rows = self.world.rows_of(number, label)
        known = Background.of_embeddings(encoder.embed(test.x[own]))
        absent, all_of = encoder.embed(test.x[others]), encoder.embed(train.x[rows])
        counted = self.view.singly and not self.view.privacy.noisy
        for target in targets:
            mine = torch.isin(rows, target.rows)
            size = float(len(target.rows)) if counted else None
            prototypes = target.prototypes.to(all_of)
            self.guesses.setdefault(target.size, Guesses()).add(known, prototypes, all_of[mine], absent, size)
            if not bool(mine.all()):
                self.trained.setdefault(target.size, Guesses()).add(
                    known, prototypes, all_of[mine], all_of[~mine], size
                )

    def _reconstruct(self, encoder: Encoder, targets: list[Target]) -> None:
        """Invert all prototypes of one client at once, by both attacks."""
        number = targets[0].client
        values, train = self.world.values(number), self.world.raw.train(number)
        test = self.world.test_of(self.world.raw, number)
        halves = [self.world.held_out(number, target.label, self.options.seed) for target in targets]
        likely = Likely.of_samples([values.shares(test.x[own]) for own, _ in halves])
        guess = likely.mean.clamp(0, 1)  # what the attacker thinks of a class without any upload
        goal = torch.stack([target.prototypes[0] for target in targets]).to(guess)
        key = random.key(self.options.seed, "leaks", "start", number)
        noise = torch.stack([random.uniform(random.fold(key, at), one.numel()) for at, one in enumerate(guess)])
        starts = torch.stack([guess, noise.to(guess).reshape(guess.shape)], 1)
        found = {
            "guess": guess,
            "smooth": invert(encoder.embed_raw, goal, starts, values, self.options.steps),
            "likely": invert_likely(encoder.embed_raw, goal, likely, values, self.options.steps),
        }
        pictures = self.world.kind == "pictures"
        behind, others = [], []
        for target, (_, absent) in zip(targets, halves, strict=True):
            many = min(len(target.rows), len(absent))  # as many of both: the nearest of more is nearer
            order = random.permutation(random.fold(key, -1), len(target.rows)).to(target.rows.device)
            pair = train.x[target.rows[order[:many]]], test.x[absent[:many]]
            behind.append(values.shares(pair[0]) if pictures else pair[0])
            others.append(values.shares(pair[1]) if pictures else pair[1])
        said = {name: one if pictures else values.inputs(one) for name, one in found.items()}  # tables: in deviations
        alike = {name: (likeness(one, behind), likeness(one, others)) for name, one in said.items()}
        for place, target in enumerate(targets):
            picked = {name: (one.row(place), other.row(place)) for name, (one, other) in alike.items()}
            self.likes.setdefault(target.size, []).append(picked)
            if pictures:
                nearest = behind[place][int(alike["likely"][0].nearest[place])]
                tile = (nearest, *(found[name][place] for name in ("likely", "smooth", "guess")))
                self.shown.append(Tile(target.size, *(picture.cpu() for picture in tile)))

    def reconstructed(self) -> list[dict[str, Any]]:
        """By class size: how near each attack comes to the nearest sample behind a prototype, and how near to the
        nearest of as many that are not behind it."""
        return [self._line(size, self.likes[size]) for size in (SENT, *SIZES) if size in self.likes]

    def _line(self, size: int, picked: list[dict[str, tuple[Likeness, Likeness]]]) -> dict[str, Any]:
        line: dict[str, Any] = self._size(size) | {"prototypes": len(picked)}
        guesses = [one["guess"][0] for one in picked]
        for attack in picked[0]:
            found, others = zip(*(one[attack] for one in picked), strict=True)
            line[attack] = self._means(found) | {f"other_{key}": v for key, v in self._means(others).items()}
            line[attack]["nearer_than_others"] = _nearer(found, others)
            line[attack]["nearer_than_guess"] = _nearer(found, guesses)
        return line

    def _means(self, likes: Sequence[Likeness]) -> dict[str, float | None]:
        keys = ("psnr", "ssim", "correlation", "error") if self.world.kind == "pictures" else ("correlation", "error")
        known = {key: [getattr(one, key) for one in likes] for key in keys}
        means = {key: float(torch.cat(parts).mean()) for key, parts in known.items() if parts[0] is not None}
        return dict.fromkeys(("psnr", "ssim", "correlation", "error")) | means

    def _size(self, size: int) -> dict[str, Any]:
        if size == SENT:
            return {"size": None, "samples": statistics.median(self.sizes)}
        return {"size": size, "samples": size}

    def found_members(self) -> list[dict[str, Any]]:
        """By class size: how well members are told from samples of the class that nobody trained on."""
        lines = []
        for size in (size for size in (SENT, *SIZES) if size in self.guesses):
            line = self._size(size) | self.guesses[size].told()
            if size in self.trained:
                told = self.trained[size].told()
                line["trained_auc"] = {name: told[name]["auc"] for name in ("distance", "likelihood")}
            lines.append(line)
        return lines


def _nearer(found: Sequence[Likeness], others: Sequence[Likeness]) -> float:
    """How often the first is nearer; ties count half."""
    pairs = [(float(one.error), float(other.error)) for one, other in zip(found, others, strict=True)]
    return sum((a < b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)
