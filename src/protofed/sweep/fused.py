"""A bundle of cells in one process: trained together if that pays, and otherwise one after another."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from protofed.config.experiment import Experiment
from protofed.data.sources import load
from protofed.engines.fused.engine import Fusion, RunEngine
from protofed.engines.resources import bytes_of, how_many_fit, torch_settings
from protofed.engines.stacked.engine import StackedEngine
from protofed.errors import UserError
from protofed.runs.cohort import draw_cohort
from protofed.runs.compiling import compile_if_it_pays, kept_choice
from protofed.runs.folder import RunFolder
from protofed.runs.interrupt import on_interrupt
from protofed.runs.loop import carry_out
from protofed.runs.measure import Result
from protofed.runs.probes import Probes
from protofed.runs.setup import Prepared, prepare
from protofed.runs.watch import Watch

PAYS = 0.9  # of the time that cells take one after another; what is slower is not worth it
COPIES = 6  # of a client's state: kept, stacked, in lanes, with gradients and momentum, and sent


@dataclass
class Seat:
    """One cell of a bundle."""

    experiment: Experiment
    folder: RunFolder
    watch: Watch
    prepared: Prepared
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def engine(self) -> StackedEngine:
        assert isinstance(self.prepared.engine, StackedEngine)
        return self.prepared.engine

    @property
    def bytes(self) -> int:
        """The memory that its clients and samples take, roughly."""
        engine = self.engine
        states = max(bytes_of(spec.params) + bytes_of(spec.buffers) for spec in engine.specs())
        data, domains = engine.federation, range(len(engine.federation.shapes))
        samples = [(data.train_part(domain), data.test_part(domain)) for domain in domains]
        return COPIES * data.clients * states + 3 * bytes_of(samples)


def seats(
    orders: Sequence[tuple[Experiment, RunFolder, Watch]],
    data_dir: Any,
    cores: int,
    probes: Probes,
) -> Iterator[Seat | UserError]:
    """Prepare these cells, loading their data once; a cell that cannot be prepared gets an error instead."""
    domains = None
    for experiment, folder, watch in orders:
        try:
            folder.check(experiment, resume=True)
            domains = domains or load(experiment.data, data_dir)
            prepared = prepare(experiment, data_dir, domains, cores=cores, tell=watch.note, probes=probes)
            yield Seat(experiment, folder, watch, prepared)
        except UserError as error:
            yield error


def that_fit(seats: Sequence[Seat]) -> int:
    """How many of these cells fit in memory together."""
    try:
        return how_many_fit(max(seat.bytes for seat in seats), seats[0].engine.device, "one cell", "")
    except UserError:
        return 1


def together(seats: Sequence[Seat], cores: int, probes: Probes, ended: Callable[[int, Any], None]) -> bool:
    """Train these cells together if that pays; returns whether it did. `ended` hears each cell's result, or its
    error."""
    one_by_one = (
        seat.engine.sizes.chunk == 1
        or seat.engine.why_not(seat.experiment.method)
        or seat.prepared.domains[0].computed is not None  # whose samples are here for one cohort only
        or seat.experiment.incremental.on  # whose samples are those of one task
        for seat in seats
    )
    if len(seats) < 2 or any(one_by_one):
        return False
    first = seats[0].experiment
    with torch_settings(False, 1, first.engine.precision), _saying_stop(seats):
        fusion = Fusion(
            [seat.experiment.method for seat in seats],
            [seat.engine for seat in seats],
            [seat.experiment.rounds for seat in seats],
            chunk=first.engine.chunk,
            workers=first.engine.threads or cores,
        )
        if not _worth_it(fusion, seats):
            return False
        fusion.run([_work(number, seat, probes, ended) for number, seat in enumerate(seats)])
    return True


def _work(number: int, seat: Seat, probes: Probes, ended: Callable[[int, Any], None]) -> Callable[[RunEngine], None]:
    def work(engine: RunEngine) -> None:
        found: Result | BaseException
        try:
            prepared = seat.prepared._replace(engine=engine)
            found = carry_out(seat.experiment, seat.folder, prepared, seat.watch, seat.stop, probes=probes)
        except BaseException as error:  # it is for this cell alone
            found = error
        ended(number, found)

    return work


@contextlib.contextmanager
def _saying_stop(seats: Sequence[Seat]) -> Iterator[None]:
    """On the first Ctrl-C, all cells end their round; on the second, they stop at once."""

    def ask() -> None:
        if seats[0].stop.is_set():
            raise KeyboardInterrupt
        for seat in seats:
            seat.stop.set()

    with on_interrupt(ask):
        yield


def _worth_it(fusion: Fusion, seats: Sequence[Seat]) -> bool:
    """Whether cells are trained together: found by a few steps, and kept with the cells, because sums may round
    differently. The same then decides whether steps are compiled."""
    before = [kept_choice(seat.folder) for seat in seats]
    said = [bool(choice["together"]) for choice in before if "together" in choice]
    servers = [seat.experiment.method.init_server(seat.engine.specs()[0]) for seat in seats]
    cohorts = [draw_cohort(seat.experiment, 0) for seat in seats]
    down, numbers = fusion.first(servers, cohorts)
    method, first = fusion.method, seats[0]
    if not said:
        alone = first.engine.trial(first.experiment.method, servers[0], cohorts[0])
        said = [fusion.engine.trial(method, down, numbers) < PAYS * alone * len(seats)]
        first.engine.clock.take()  # what was tried is no part of any round
    if not all(said):
        return False
    choice = before[0] | {"together": True}
    for run in fusion.runs:
        run.choice = choice
    if first.experiment.engine.compile == "auto":
        rounds = max(seat.experiment.rounds for seat in seats)
        compile_if_it_pays(method, fusion.engine, down, numbers, rounds, choice, lambda choice: None, first.watch.note)
    elif first.experiment.engine.compile == "always":
        fusion.engine.use(compiled=True)
    fusion.reference.clock.take()
    return True
