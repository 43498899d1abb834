"""One client: its data, its model and its state, and an answer to every request."""

import hashlib
import json
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from protofed.engines.reference import ReferenceEngine
from protofed.errors import UserError
from protofed.experiment import Experiment
from protofed.federation.build import choose_model, client_domain, one_client
from protofed.federation.leaving import describe, withhold
from protofed.federation.protocol import Message, Refused, body_of, failure, one_line, pack, unpack, whole
from protofed.federation.settings import (
    ClientSettings,
    Task,
    experiment_hash,
    load_client,
    load_experiment,
    task_of,
)
from protofed.federation.state import Kept, StateFolder
from protofed.federation.verify import read_tree
from protofed.method import Client, Tree
from protofed.ops.trees import all_finite, deal
from protofed.prepare import check_phases, threads
from protofed.sections import ModelChoice

WHO = ("personal", "global")
NAN = "its loss is no longer a number. Lower optimizer.lr or optimizer.clip in a new run, or look at its data"


class Worker:
    """A client as a long-lived object: it answers one request at a time."""

    def __init__(
        self,
        experiment: Experiment,
        settings: ClientSettings,
        task: Task,
        engine: ReferenceEngine,
        choice: ModelChoice,
        server: Tree,  # as the server begins: for the form of what it sends
        state: StateFolder,
        min_count: int,
        tell: Callable[[str], None],
    ) -> None:
        self.experiment, self.method, self.settings, self.task = experiment, experiment.method, settings, task
        self.engine, self.choice, self.server, self.state = engine, choice, server, state
        self.min_count, self.tell = min_count, tell
        self.number = settings.number
        self.down = deal(self.method.broadcast(server, torch.tensor([self.number])), 0)
        self.hash = experiment_hash(experiment)
        self.session = secrets.token_hex(8)
        self.refusal: str | None = None  # why the server does not let it take part, if so
        self._lock = threading.Lock()
        self._kinds = {"hello": self._hello, "train": self._train, "finish": self._finish, "evaluate": self._evaluate}

    def close(self) -> None:
        """Let go of the state folder."""
        self.state.close()

    def answer(self, request: bytes) -> bytes:
        """The answer to a request; never raises: an error is an answer that says so."""
        with self._lock:
            try:
                message = unpack(request)
                with threads(self.experiment, self.engine):
                    return self._answer(message)
            except (Refused, UserError) as refused:
                self.tell(f"refused what the server asked: {refused}")
                return failure(str(refused), client=self.number)
            except Exception as error:  # whatever it is, the server must hear of it, and this client must live on
                self.tell(f"failed: {type(error).__name__}: {error}")
                return failure(f"{type(error).__name__}: {error}", client=self.number)

    def _answer(self, message: Message) -> bytes:
        head = message.head
        kind = head.get("kind")
        if kind == "refused":
            self.refusal = one_line(head.get("reason"))
            self.tell(f"the server refuses this client: {self.refusal}")
            return self._pack(head, "refused")
        if kind not in self._kinds:
            raise Refused(f"{one_line(kind)[:40]!r} is nothing that a client does")
        if head.get("experiment") != self.hash:
            raise Refused(
                f"the server's experiment ({one_line(head.get('experiment'))[:12]}) is not the one in this bundle "
                f"({self.hash[:12]}). Get the federation's present bundle, and read what has changed"
            )
        if head.get("client") not in (self.number, None):
            raise Refused(f"this is client {self.number}, not client {one_line(head.get('client'))[:10]}")
        return self._kinds[kind](message)

    def _pack(self, head: dict[str, Any], kind: str, body: bytes = b"", **more: Any) -> bytes:
        who = {"experiment": self.hash, "run": head.get("run"), "client": self.number, "session": self.session}
        return pack({"kind": kind, **who, "round": head.get("round"), **more}, body)

    def _hello(self, message: Message) -> bytes:
        told = message.head.get("task")
        classes = told.get("classes") if isinstance(told, dict) else None
        if classes != list(self.task.classes):
            raise Refused(f"the server's classes are {one_line(classes)[:80]}, here they are {list(self.task.classes)}")
        self.refusal = None
        federation = self.engine.federation
        return self._pack(
            message.head,
            "hello",
            name=self.settings.name,
            samples=int(federation.counts[self.number].sum()),
            tests=len(federation.test(self.number).y),
            shape=list(federation.shape(self.number)),
            model={"name": self.choice.name, **self.choice.options},
        )

    def _train(self, message: Message) -> bytes:
        head = message.head
        round = whole(head, "round", 1, self.experiment.rounds)
        return self._once(message, round, lambda down: self._update(down, round))

    def _update(self, down: Tree, round: int) -> tuple[Client, dict[str, Any], bytes]:
        update = self.engine.update(self.method, self.number, down, round - 1)
        if not bool(all_finite((update.loss, update.client.params, update.up))):
            raise Refused(f"in round {round} {NAN}")
        up = withhold(update.up, self.engine.federation.counts[self.number], self.min_count)
        loss = [float(update.loss.total), float(update.loss.weight)]
        self.tell(f"round {round}: trained, loss {loss[0] / max(loss[1], 1e-12):.3f}")
        return update.client, {"loss": loss}, body_of(up)

    def _finish(self, message: Message) -> bytes:
        """The last phases, and the tests after them."""
        round = whole(message.head, "round", self.experiment.rounds + 1, self.experiment.rounds + 1)

        def last(got: Tree) -> tuple[Client, dict[str, Any], bytes]:
            client, loss = self.engine.last(self.method, self.number, got["down"], round - 1)
            if not bool(all_finite((loss, client.params))):
                raise Refused(f"after the last round {NAN}")
            self.tell("the last phases are done")
            return client, {}, self._tested(message.head, client, got)

        return self._once(message, round, last, self._test_form(message.head))

    def _once(
        self,
        message: Message,
        round: int,
        work: Callable[[Tree], tuple[Client, dict[str, Any], bytes]],
        form: Tree = None,
    ) -> bytes:
        """The answer that was given before to the same request, or a new one; the state it leads to is kept first."""
        run = str(message.head.get("run"))
        asked = json.dumps([message.head.get(key) for key in ("kind", "ask", "confusion")]).encode()
        request = hashlib.sha256(asked + message.body).hexdigest()
        kept = self.state.read(run, round)
        if kept is None or kept.request != request:
            before = self.state.before(run, round)
            down = self._here(read_tree(message.body, self.down if form is None else form, self.experiment.clients))
            self.engine.clients = {} if before is None else {self.number: self._here(before.client)}
            client, head, body = work(down)
            kept = Kept(round, client, pack(head, body), request)
            self.state.put(run, kept, 0 if before is None else before.round)
        stored = unpack(kept.answer)
        more = {key: value for key, value in stored.head.items() if key not in ("protocol", "protofed")}
        return self._pack(message.head, "answer", stored.body, **more)

    def _here(self, tree: Tree) -> Tree:
        device = self.engine.federation.device
        return tree_map(lambda tensor: tensor.to(device), tree)

    def _evaluate(self, message: Message) -> bytes:
        head = message.head
        kept = self.state.at(str(head.get("run")), whole(head, "round", 0, self.experiment.rounds + 1))
        self.engine.clients = {} if kept is None else {self.number: self._here(kept.client)}
        got = self._here(read_tree(message.body, self._test_form(head), self.experiment.clients))
        client = self.engine.client(self.method, self.number)
        return self._pack(head, "answer", self._tested(head, client, got))

    def _test_form(self, head: dict[str, Any]) -> Tree:
        """What comes with a request for tests: what the server broadcasts, and the global model if it is tested."""
        ask = head.get("ask")
        if not isinstance(ask, list) or not set(ask) <= {f"{o}/{w}" for o in ("own", "validation") for w in WHO}:
            raise Refused(f"{one_line(ask)[:60]} is nothing that a client is tested on")
        model = self.method.global_client(self.server)
        return {"down": self.down} | ({} if model is None else {"global": model})

    def _tested(self, head: dict[str, Any], client: Client, got: Tree) -> bytes:
        found = {}
        for ask in head["ask"]:
            on, who = ask.split("/")
            one = got["global"] if who == "global" else client
            tally = self.engine.tested(self.method, self.number, one, got["down"], on, str(head.get("confusion") or ""))
            found[ask] = {
                kind: {"right": c.right, "samples": c.samples} | ({"said": c.said} if len(c.said) else {})
                for kind, c in tally.items()
            }
        return body_of(found)

    def describe(self) -> str:
        """What it will send: which arrays, shapes, types, bytes, and whether the server sees them singly."""
        with self._lock, threads(self.experiment, self.engine):
            self.engine.clients = {}
            return describe(self.experiment, self.settings, self.engine, self._here(self.down), self.min_count)


def make_worker(
    bundle: Path, *, data: str | None, model: str | None, state: Path, min_count: int, tell: Callable[[str], None]
) -> Worker:
    """A client from its bundle; a UserError where it cannot take part."""
    settings, task = load_client(bundle)
    experiment = load_experiment(bundle)
    if settings.number >= experiment.clients:
        raise UserError(
            f"{bundle / 'client.toml'}: client.number = {settings.number}, but the experiment has clients = "
            f"{experiment.clients}, counted from 0. Get the federation's present bundle."
        )
    if min_count < 0:
        raise UserError(f"--min-count {min_count} should be 0 or more.")
    task = task if task.classes else task_of(experiment)
    choice = choose_model(model, experiment, settings.number)
    domain = client_domain(data, experiment, settings.number, task)
    engine = one_client(experiment, settings.number, domain, choice)
    check_phases(experiment, engine)
    server_model = experiment.model_of(0)
    server = experiment.method.init_server(engine.spec_of(server_model, task.shape, server_model.label))
    return Worker(experiment, settings, task, engine, choice, server, StateFolder(state, tell), min_count, tell)
