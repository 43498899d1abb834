"""Who is there: new nodes are greeted, and those that may take part are members until they are gone."""

import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from protofed.engines.reference import ReferenceEngine
from protofed.errors import UserError
from protofed.experiment import Experiment
from protofed.federation.protocol import Message, Refused, one_line, pack, unpack, whole
from protofed.federation.settings import FederationSettings, experiment_hash
from protofed.federation.status import Status
from protofed.federation.transport import Transport
from protofed.federation.verify import upload_form
from protofed.method import Spec, Tree
from protofed.sections import ModelChoice

AGAIN = 15.0  # seconds, after which a node that was refused or silent is greeted again; twice as many each time
LATEST = 600.0  # such seconds at most
GREETING = 30.0  # seconds for an answer to a greeting
WIDEST = 16  # how many times larger than the task's a client's samples may be


class Member(NamedTuple):
    """A client that may take part."""

    number: int
    node: int
    samples: int
    tests: int
    spec: Spec
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
        self.members: dict[int, Member] = {}
        self._later: dict[int, tuple[float, int]] = {}  # nodes: when they are greeted again, and how often they were
        self._forms: dict[Any, tuple[Spec, Tree]] = {}

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
        self._later = {node: when for node, when in self._later.items() if node in nodes}
        here, now = {member.node for member in self.members.values()}, time.monotonic()
        new = {n: number for n, number in nodes.items() if n not in here and self._later.get(n, (0.0, 0))[0] <= now}
        if new:
            self._greet(new)

    def forget(self, number: int, later: bool = False) -> None:
        """It does not answer, or has been started anew: it has to be greeted again, at once or `later`."""
        member = self.members.pop(number, None)
        if member is not None and later:
            self._postpone(member.node)

    def _postpone(self, node: int) -> None:
        times = self._later.get(node, (0.0, 0))[1]
        self._later[node] = time.monotonic() + min(LATEST, AGAIN * 2**times), times + 1

    def name(self, number: int) -> str:
        return self.status.clients[number].name

    def _greet(self, nodes: Mapping[int, int | None]) -> None:
        task = {"shape": list(self.settings.task.shape), "classes": list(self.settings.task.classes)}
        requests = {n: pack(self.head("hello", number, task=task)) for n, number in nodes.items()}
        refusals: dict[int, str] = {}
        for node in nodes:
            self._postpone(node)
        for reply in self.transport.exchange(requests, min(GREETING, self.settings.rounds.deadline_s)):
            if reply.node not in nodes:
                continue
            number = nodes[reply.node]
            try:
                if reply.content is None:
                    raise Refused(f"no answer to the greeting: {one_line(reply.error)}")
                message = unpack(reply.content, self.settings.rounds.max_bytes)
                if number is None and type(message.head.get("client")) is int:
                    number = message.head["client"]  # what it says itself
                if message.head.get("kind") == "error":
                    raise Refused(f"it refuses: {one_line(message.head.get('reason'))}")
                self._join(reply.node, nodes[reply.node], message)
            except Refused as refused:
                self.status.refuse(number, str(refused), who=f"node {reply.node}")
                if reply.content is not None:
                    refusals[reply.node] = str(refused)
        if refusals:
            said = {n: pack(self.head("refused", None, reason=reason)) for n, reason in refusals.items()}
            for _ in self.transport.exchange(said, min(10.0, self.settings.rounds.deadline_s)):
                pass  # that it heard it is all there is to know

    def _join(self, node: int, key: int | None, message: Message) -> None:
        head = message.head
        if head.get("kind") != "hello" or head.get("experiment") != self.hash:
            raise Refused("its experiment is another. Give it the bundle of this federation")
        number = whole(head, "client", 0, self.experiment.clients - 1)
        if number not in self.status.clients or (key is not None and key != number):
            raise Refused(f"it says it is client {number}, which its key does not say. Use that client's own bundle")
        if number in self.members:  # of two nodes without keys, the one that was started last
            self.status.tell(f"{self.name(number)} is now at another node")
            self.forget(number, later=True)
        samples, tests = whole(head, "samples"), whole(head, "tests")
        spec, form = self._form(number, head)
        member = Member(number, node, samples, tests, spec, form, one_line(head.get("session")))
        self.members[number] = member
        self._later.pop(node, None)
        self.status.client(number, "joined", samples=samples, architecture=spec.architecture, last_reason=None)
        self.status.tell(f"{self.name(number)} joined: {samples} training samples, {spec.architecture}")

    def _form(self, number: int, head: dict[str, Any]) -> tuple[Spec, Tree]:
        """The model that a client says it has, and what its uploads look like."""
        choice = self._choice(head.get("model"))
        shape = head.get("shape")
        most = WIDEST * math.prod(self.settings.task.shape)
        if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape) or math.prod(shape) > most:
            raise Refused(f"its samples have shape {one_line(shape)[:40]}, the task's {list(self.settings.task.shape)}")
        known = (choice.label, tuple(shape))
        if known not in self._forms:
            first = self.engine.specs()[0]
            try:
                spec = self.engine.spec_of(choice, tuple(shape), choice.label)
                self.experiment.method.check([first, spec])
                form = upload_form(self.experiment, first, number, choice, tuple(shape))
            except UserError as error:
                raise Refused(str(error)) from None
            except (RuntimeError, AttributeError, ValueError) as error:
                raise Refused(f"with {choice.label} on {tuple(shape)} it cannot take part: {one_line(error)}") from None
            self._forms[known] = spec, form
        return self._forms[known]

    def _choice(self, model: Any) -> ModelChoice:
        listed = [choice for choice in self.experiment.model if {"name": choice.name, **choice.options} == model]
        if listed:
            return listed[0]
        try:
            if not isinstance(model, dict):
                raise UserError("it names no model")
            return Experiment.from_dict({"model": model}).model[0]
        except UserError as error:
            raise Refused(f"its model is not known here: {error}") from None
