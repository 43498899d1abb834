"""Who is there: new nodes are greeted, and those that may take part are members until they are gone."""

import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from protofed.config.experiment import Experiment
from protofed.config.registry import ModelChoice
from protofed.engines.reference import ReferenceEngine
from protofed.errors import UserError
from protofed.method import Tree
from protofed.remote.build import initial_spec
from protofed.remote.protocol import (
    Message,
    Refused,
    check_answer,
    one_line,
    pack_message,
    unpack_message,
    whole_number,
)
from protofed.remote.server.models import check_size, shipped_model
from protofed.remote.server.status import Status
from protofed.remote.server.verify import upload_form
from protofed.remote.settings import FederationSettings, experiment_hash
from protofed.remote.transport import Transport
from protofed.runs.budget import noise_of

MOST_GREETING = 2**15  # bytes of an answer to a greeting, which has a head and nothing behind it
MANY_TIMES = 10  # the samples of any other client: a client that says it has so many more is pointed out
AGAIN = 15.0  # seconds, after which a node that was refused or silent is greeted again; twice as many each time
LATEST = 600.0  # such seconds at most
GREETING, HALVED = 30.0, 5  # seconds for an answer to a greeting, and how often at most they are halved, if none came
FORMS = 64  # of uploads that are remembered
MODELS = 8  # that one client may tell of while the server runs: each is built here once
WIDEST = 16  # how many times larger than the task's a client's samples may be


class Member(NamedTuple):
    """A client that may take part."""

    number: int
    node: int
    samples: int
    tests: int
    architecture: str
    form: Tree  # of its uploads
    session: str


class Roster:
    """Members by number, kept up to date by `refresh`."""

    def __init__(
        self,
        transport: Transport,
        settings: FederationSettings,
        experiment: Experiment,
        engine: ReferenceEngine,
        run: str,
        status: Status,
    ) -> None:
        self.transport, self.settings, self.experiment, self.status = transport, settings, experiment, status
        self.engine, self.run = engine, run
        self.hash = experiment_hash(experiment)
        self.noise = noise_of(experiment) if experiment.privacy.noisy else None
        self.members: dict[int, Member] = {}
        self._later: dict[int, tuple[float, int]] = {}  # nodes: when they are greeted again, and how often they were
        self._forms: dict[Any, tuple[str, Tree]] = {}
        self._told: dict[int, set[Any]] = {}  # which models each client has told of
        self._silent: dict[int, int] = {}  # nodes: greetings in a row that were not answered, also if they left between

    def head(self, kind: str, number: int | None, **more: Any) -> dict[str, Any]:
        return {"kind": kind, "experiment": self.hash, "run": self.run, "client": number, **more}

    def refresh(self) -> None:
        """Greet who is new, forget who is gone."""
        nodes = self.transport.nodes()
        for number, member in list(self.members.items()):
            if member.node not in nodes:
                del self.members[number]
                self.status.client(number, "lost", heard=False)
                self.status.tell(f"{self.name(number)} is gone")
                self.status.log("left", sync=False, client=self.name(number))
        self._later = {node: when for node, when in self._later.items() if node in nodes}
        here, now = {member.node for member in self.members.values()}, time.monotonic()
        new = {n: number for n, number in nodes.items() if n not in here and self._later.get(n, (0.0, 0))[0] <= now}
        if new:
            self._greet(new)

    def forget(self, number: int, later: bool = False) -> None:
        """It does not answer, or has been started again: it has to be greeted again, at once or `later`."""
        member = self.members.pop(number, None)
        if member is not None and later:
            self._postpone(member.node)

    def put_out(self, number: int) -> None:
        """Remove it from the members. It is told when it next greets the server."""
        member = self.members.pop(number, None)
        if member is not None:
            self._later.pop(member.node, None)

    def let_in(self) -> None:
        """Somebody who was out may come again: who waits is greeted at once."""
        self._later.clear()

    def _postpone(self, node: int) -> None:
        times = self._later.get(node, (0.0, 0))[1]
        self._later[node] = time.monotonic() + min(LATEST, AGAIN * 2**times), times + 1

    def name(self, number: int) -> str:
        return self.status.clients[number].name

    def _greet(self, nodes: Mapping[int, int | None]) -> None:
        task = {"shape": list(self.settings.task.shape), "classes": list(self.settings.task.classes)}
        requests = {n: pack_message(self.head("hello", number, task=task)) for n, number in nodes.items()}
        refusals: dict[int, str] = {}
        for node in nodes:
            self._postpone(node)
        patience = max(GREETING / 2 ** min(self._silent.get(node, 0), HALVED) for node in nodes)
        for node in nodes:
            self._silent[node] = self._silent.get(node, 0) + 1
        for reply in self.transport.exchange(requests, min(patience, self.settings.rounds.deadline_s)):
            if reply.node not in nodes:
                continue
            if reply.content is not None:
                self._silent.pop(reply.node, None)
            number = nodes[reply.node]
            try:
                if reply.content is None:
                    raise Refused(f"no answer to the greeting: {one_line(reply.error)}")
                message = unpack_message(reply.content, MOST_GREETING)
                if number is None and type(message.head.get("client")) is int:
                    number = message.head["client"]  # what it says itself
                if message.head.get("kind") == "error":
                    raise Refused(f"it refuses: {one_line(message.head.get('reason'))}")
                self._join(reply.node, nodes[reply.node], message)
            except Exception as error:  # whatever one client says, the others are greeted
                refused = error if isinstance(error, Refused) else f"its greeting cannot be read ({one_line(error)})"
                if reply.content is None and number in self.status.clients:
                    self.status.miss(number, str(refused), "lost")
                else:
                    self.status.refuse(number, str(refused), who=f"node {reply.node}")
                if reply.content is not None:
                    refusals[reply.node] = str(refused)
        if refusals:
            said = {n: pack_message(self.head("refused", None, reason=reason)) for n, reason in refusals.items()}
            for _ in self.transport.exchange(said, min(10.0, self.settings.rounds.deadline_s)):
                pass  # that it heard it is all there is to know

    def _join(self, node: int, key: int | None, message: Message) -> None:
        head = message.head
        if head.get("kind") != "hello" or head.get("experiment") != self.hash:
            raise Refused("its experiment is another. Give it the bundle of this federation")
        noise = () if self.noise is None else ("noise",)
        check_answer(head, "hello", "name", "samples", "tests", "shape", "model", *noise)
        number = whole_number(head, "client", 0, self.experiment.clients - 1)
        if number not in self.status.clients or (key is not None and key != number):
            raise Refused(f"it says it is client {number}, which its key does not say. Use that client's own bundle")
        ledger = self.status.ledger
        if number in ledger.out:
            raise Refused(f"it was put out: {ledger.out[number]['reason']}. The operator can let it in again")
        if number in self.members:  # of two nodes without keys, the one that was started last
            self.status.tell(f"{self.name(number)} is now at another node")
            self.forget(number, later=True)
        most, before = self.settings.most_samples(number), self.status.clients[number].samples
        samples, tests = whole_number(head, "samples", most=most), whole_number(head, "tests", most=most)
        if self.noise is not None and head.get("noise") != self.noise:
            raise Refused(
                f"it adds noise of {one_line(head.get('noise'))[:20]} times privacy.clip, and the server counts on "
                f"{self.noise!r}. Install the same dp-accounting on both, or set privacy.noise in a new federation"
            )
        architecture, form = self._form(number, head)
        self.members[number] = Member(number, node, samples, tests, architecture, form, one_line(head.get("session")))
        self._later.pop(node, None)
        self.status.client(number, "joined", samples=samples, architecture=architecture, last_reason=None)
        changed = f" (before: {before})" if before not in (None, samples) else ""
        many = f"{samples} training samples{changed}, " if self.noise is None else ""
        self.status.tell(f"{self.name(number)} joined: {many}{architecture}")
        about: dict[str, Any] = {"samples": samples, "tests": tests, "model": architecture, "node": str(node)}
        self.status.log("joined", sync=False, client=self.name(number), **about)
        others = [seen.samples or 0 for seen in self.status.clients.values() if seen.number != number]
        if samples > MANY_TIMES * max(others, default=0) > 0:
            self.status.tell(
                f"{self.name(number)} says that it has more than {MANY_TIMES} times as many samples as any other "
                "client, and would count that much more. If it has not, set samples under its [[clients]] in "
                "federation.toml"
            )

    def _form(self, number: int, head: dict[str, Any]) -> tuple[str, Tree]:
        """The name of the model that a client says it has, and what its uploads look like."""
        choice = self._choice(head.get("model"))
        shape = head.get("shape")
        most = WIDEST * math.prod(self.settings.task.shape)
        if not isinstance(shape, list) or len(shape) > 8 or not all(type(n) is int and n > 0 for n in shape):
            raise Refused(f"its samples have shape {one_line(shape)[:40]}, which are not sizes")
        if math.prod(shape) > most:
            raise Refused(f"its samples have shape {one_line(shape)[:40]}, the task's {list(self.settings.task.shape)}")
        known, told = (choice.label, tuple(shape)), self._told.setdefault(number, set())
        told.add(known)
        if len(told) > MODELS:
            told.discard(known)
            raise Refused(f"it has announced {MODELS} other models already; the operator must start the server again")
        if known not in self._forms:
            self._forms[known] = self._made(number, choice, tuple(shape))
            if len(self._forms) > FORMS:
                del self._forms[next(iter(self._forms))]
        return self._forms[known]

    def _made(self, number: int, choice: ModelChoice, shape: tuple[int, ...]) -> tuple[str, Tree]:
        first = self.engine.specs()[0]
        try:
            if choice not in self.experiment.model:
                check_size(choice, shape, first.classes)
            spec = initial_spec(self.engine, choice, shape)
            self.experiment.method.check([first, spec])
            return spec.architecture, upload_form(self.experiment, first, number, choice, shape)
        except UserError as error:
            raise Refused(str(error)) from None
        except (RuntimeError, AttributeError, ValueError) as error:
            raise Refused(f"with {choice.label} on {shape} it cannot take part: {one_line(error)}") from None

    def _choice(self, model: Any) -> ModelChoice:
        """A model of the experiment, or one that comes with protofed: a name from the wire is never imported."""
        listed = [choice for choice in self.experiment.model if {"name": choice.name, **choice.options} == model]
        if listed:
            return listed[0]
        if not isinstance(model, dict):
            raise Refused("its model is not known here: it names no model")
        return shipped_model(model)
