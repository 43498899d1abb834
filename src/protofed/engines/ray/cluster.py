"""Workers on a Ray cluster, started here or joined. They get work, and lost ones are replaced."""

import contextlib
import importlib.util
import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from protofed.engines.ray.process import check_reached, own_signals, ray_folder, ray_token
from protofed.engines.ray.worker import Made, RayWorker
from protofed.errors import UserError, option
from protofed.version import VERSION

PLACE = 60.0  # seconds for Ray to find room for a worker
TRIES = 3  # workers that one share of work may crash
EIGHTH = 8  # default number of workers per machine, roughly


@dataclass
class WorkerSlot:
    """A slot for one worker, and the worker in it."""

    actor: Any
    starting: Any = None  # the pending answer of a worker that is starting up
    ready: bool = False
    machine: str = "?"


def check_installed() -> None:
    if importlib.util.find_spec("ray") is None:
        raise UserError("engine.name = 'ray' needs Ray, which is not installed. Run: pip install 'protofed[ray]'")


class Cluster:
    """The Ray workers of one run."""

    def __init__(
        self, gpus: bool, workers: int, threads: int, most: int, cores: int, tell: Callable[[str], None]
    ) -> None:
        """Join the cluster at RAY_ADDRESS, or start Ray here on `cores` cores; `most`: most workers worth starting."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_gcs_server_request_timeout_seconds", "10")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        self.ray, self.places, self.losses = ray, list[WorkerSlot](), list[str]()
        self.compiled: bool | None = None  # None: follow the experiment
        self._undo = contextlib.ExitStack()
        try:
            self._join(cores, tell)
            self.threads, self.workers, self.gpu = self._room(gpus, workers, threads, most)
        except BaseException:
            self.close()
            raise

    # joining

    def _join(self, cores: int, tell: Callable[[str], None]) -> None:
        ray, address = self.ray, os.environ.get("RAY_ADDRESS", "").strip()
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        self.joined = ray.is_initialized() or address not in ("", "local")
        if ray.is_initialized():
            return
        self._undo.enter_context(own_signals())
        if not self.joined:
            tell(f"starting Ray here, on {cores} core{'s' * (cores > 1)}")
            folder = self._undo.enter_context(ray_folder())
            self._undo.enter_context(ray_token())
            self._undo.callback(ray.shutdown)
            own = {"include_dashboard": False, "_temp_dir": folder, "_node_ip_address": "127.0.0.1"}
            ray.init("local", num_cpus=cores, _system_config={"worker_niceness": 0}, **own, **quiet)
            return
        tell(f"joining the Ray cluster at {address}")
        check_reached(address)
        self._undo.callback(ray.shutdown)
        try:
            ray.init(address, **quiet)
        except Exception as error:  # many kinds: no cluster, wrong version, no token
            raise UserError(f"RAY_ADDRESS = {address!r} cannot be joined: {_short(str(error))}") from None
        self._same_versions()

    def _same_versions(self) -> None:
        """Check that every machine has this one's protofed and torch; Ray itself compares Ray and Python."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        def versions() -> dict[str, str]:  # sent by value: protofed may be missing there
            import importlib

            found = {}
            for package, attribute in (("protofed.version", "VERSION"), ("torch.version", "__version__")):
                try:
                    found[package.split(".")[0]] = str(getattr(importlib.import_module(package), attribute))
                except ImportError:
                    found[package.split(".")[0]] = "none"
            return found

        look = self.ray.remote(num_cpus=0)(versions)
        here = {"protofed": VERSION, "torch": version("torch")}
        there = {
            node["NodeManagerHostname"]: look.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote()
            for node in self._nodes()
        }
        for machine, answer in there.items():
            for package, found in self._get(answer, PLACE).items():
                if found.partition("+")[0] != here[package].partition("+")[0]:
                    raise UserError(
                        f"{machine} of the Ray cluster has {package} {found}, but this machine has {here[package]}. "
                        "Install the same version on all of its machines."
                    )

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self.ray.nodes() if node["Alive"]]

    def _room(self, gpus: bool, workers: int, threads: int, most: int) -> tuple[int, int, bool]:
        """Cores per worker, the number of workers, and whether each has a GPU."""
        machines = [node["Resources"] for node in self._nodes()]
        gpu = gpus and any(machine.get("GPU", 0) for machine in machines)
        cores = [int(machine.get("CPU", 0)) for machine in machines if not gpu or machine.get("GPU", 0)]
        each = threads or max(1, max(cores) // EIGHTH)
        free = self.ray.available_resources()
        if gpu:
            each = threads or 1
            room = sum(min(int(m.get("GPU", 0)), int(m.get("CPU", 0)) // each) for m in machines)
            now = min(int(free.get("GPU", 0)), int(free.get("CPU", 0)) // each)
        else:
            room, now = sum(c // each for c in cores), int(free.get("CPU", 0)) // each
        if max(1, workers) > room:
            what = f"engine.workers = {workers}" if workers else "one worker"
            kind = f"{sum(int(m.get('GPU', 0)) for m in machines)} GPUs and " if gpu else ""
            raise UserError(
                f"{what} of engine.threads = {each} asks for more than Ray has: {kind}{sum(cores)} cores on "
                f"{len(cores)} machine{'s' * (len(cores) > 1)}. Use engine.workers = {room} at most, or fewer threads."
            )
        return each, min(workers or max(1, min(room, now)), most), gpu

    # workers

    def start(self, make: Callable[[int, int], Made], data: str) -> str:
        """Start workers, each with the whole experiment; returns the kind of device they have."""
        self.make, self.data = self.ray.put(make), data
        self.places = [self._place() for _ in range(self.workers)]
        for place in self.places:
            place.machine = self._get(place.actor.where.remote(), PLACE)
        devices = [self._ready(place) for place in self.places]
        return devices[0]

    def _place(self) -> WorkerSlot:
        options = {"num_cpus": self.threads, "num_gpus": int(self.gpu), "scheduling_strategy": "SPREAD"}
        actor: Any = self.ray.remote(RayWorker).options(**options).remote()
        return WorkerSlot(actor, actor.start.remote(self.make, self.threads, self.workers, self.compiled))

    def _ready(self, place: WorkerSlot) -> str:
        """Wait until a worker is ready."""
        answer, place.starting = place.starting, None
        try:
            told: tuple[str, str, str] = self._get(answer)
        except UserError as error:
            raise UserError(f"on {place.machine}: {error}") from None
        place.machine, device, data = told
        if data != self.data:
            raise UserError(
                f"the data on {place.machine} differs from the data here: it gives another partition or other samples. "
                f"Copy the same files to the same {option('data-dir')} on every machine of the cluster."
            )
        place.ready = True
        return device

    def _get(self, answer: Any, seconds: float | None = None) -> Any:
        """A worker's answer; its UserErrors are raised here with the same text."""
        errors = self.ray.exceptions
        try:
            return self.ray.get(answer, timeout=seconds)
        except errors.GetTimeoutError:
            raise UserError(
                f"Ray found no room for {self.workers} workers within {PLACE:.0f} s: others use the cluster. "
                "Wait, or use fewer engine.workers."
            ) from None
        except errors.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(str(error.cause)) from None
            raise

    def spread(
        self, many: int, call: Callable[[int, int], tuple[Any, ...]], take: Callable[[int, int, Any], None]
    ) -> None:
        """Spread jobs, one per worker if all are there. `call(job, place)` is what to send to the worker at a place;
        `take(job, place, answer)` receives its answer. A lost worker's job goes to another."""
        todo, tries = list(range(many)), Counter[int]()
        running: dict[Any, tuple[int, int]] = {}
        errors = self.ray.exceptions
        while todo or running:
            busy = {place for _, place in running.values()}
            for place in (p for p, there in enumerate(self.places) if there.ready and p not in busy):
                job = next((j for j in todo if j == place or not self.places[j].ready), None)
                if job is not None:
                    todo.remove(job)
                    running[self.places[place].actor.do.remote(*call(job, place))] = job, place
            starting = {there.starting: p for p, there in enumerate(self.places) if there.starting is not None}
            remedy = f"go on with {option('resume', True)}."
            if not running and not starting:
                raise UserError(f"all Ray workers are lost. The last checkpoint is whole: {remedy}")
            done, _ = self.ray.wait([*running, *starting], num_returns=1, timeout=None if running else PLACE)
            if not done:
                raise UserError(
                    f"all Ray workers are lost, and Ray found no room for new ones within {PLACE:.0f} s. "
                    f"The last checkpoint is whole: {remedy}"
                )
            if done[0] in starting:
                self._back(self.places[starting[done[0]]])
                continue
            job, place = running.pop(done[0])
            try:
                answer = self._get(done[0])
            except (errors.RayActorError, errors.ObjectLostError, errors.NodeDiedError) as error:
                tries[job] += 1
                todo.append(job)
                self._lose(place, tries[job], error)
            else:
                take(job, place, answer)

    def _back(self, place: WorkerSlot) -> None:
        """Take a replacement that is ready. If it failed too, the others do its work."""
        try:
            self._ready(place)
        except (UserError, self.ray.exceptions.RayError) as error:
            self.losses.append(f"a lost Ray worker could not be replaced: {_short(str(error))}")

    def _lose(self, place: int, times: int, error: Exception) -> None:
        """Drop a lost worker and request a replacement."""
        machine = self.places[place].machine
        if times >= TRIES:
            raise UserError(
                f"the same clients have ended {times} Ray workers, the last on {machine}: {_short(str(error))} "
                "Is there too little memory? Use fewer engine.workers or a smaller engine.chunk, and "
                f"{option('resume', True)}."
            )
        self.losses.append(f"a Ray worker on {machine} was lost; its clients are done again by another")
        self.places[place] = self._place()

    def use(self, compiled: bool) -> None:
        """From now on, all workers and their replacements compile training steps, or do not."""
        self.compiled = compiled
        for place in self.places:
            place.actor.use.remote(compiled)

    def close(self) -> None:
        """Stop our workers, and Ray if it was started here."""
        with self._undo:
            for place in self.places:
                self.ray.kill(place.actor)
            self.places = []


def _short(reason: str) -> str:
    """Ray's message in one line."""
    return " ".join(reason.split())[:300].rstrip(". ") + "."
