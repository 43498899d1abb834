"""One client: its data, its model and its state, and an answer to every request."""

import hashlib
import json
import secrets
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from protofed.config.experiment import Experiment
from protofed.config.registry import ModelChoice
from protofed.engines.reference import ReferenceEngine
from protofed.engines.resources import torch_settings
from protofed.engines.wire import decode
from protofed.errors import UserError
from protofed.method import Client, Mean, Tree
from protofed.ops.trees import all_finite, deal
from protofed.remote.client.leaving import withhold
from protofed.remote.client.state import Kept, StateFolder
from protofed.remote.form import read_tree
from protofed.remote.protocol import (
    MANY,
    NAN,
    Message,
    Refused,
    body_of,
    failure,
    one_line,
    pack_message,
    unpack_message,
    whole_number,
)
from protofed.remote.settings import ClientSettings, Task, experiment_hash

if TYPE_CHECKING:
    from protofed.remote.client.noising import ClientNoise  # needs dp-accounting
    from protofed.remote.client.summing import ClientSums  # needs the packages of secure sums

WHO = ("personal", "global")
NOT_A_NUMBER = (
    f"its loss is {NAN}. If most clients say so, the server takes back the round before; if only this one does, look "
    "at its data, or lower optimizer.lr or optimizer.clip in a new run"
)
UNSAID = "it failed, and only its own log says why, because an error may quote samples (its privacy budget)"


class ClientWorker:
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
        sums: "ClientSums | None" = None,  # where uploads are summed under masks
        noise: "ClientNoise | None" = None,  # where they are noised
    ) -> None:
        self.experiment, self.method, self.settings, self.task = experiment, experiment.method, settings, task
        self.engine, self.choice, self.server, self.state = engine, choice, server, state
        self.min_count, self.tell, self.sums, self.noise = min_count, tell, sums, noise
        self.number = settings.number
        self.broadcast = self.method.broadcast(server, torch.tensor([self.number]))  # also for its form alone
        self.down = deal(self.broadcast, 0)
        self._most = experiment.clients * getattr(self.method, "most", 1)  # prototypes of a class: of all clients
        self.hash = experiment_hash(experiment)
        self.session = secrets.token_hex(8)
        self.refusal: str | None = None  # why the server does not let it take part, if so
        self._lock = threading.Lock()
        self._kinds = {"hello": self._hello, "train": self._train, "finish": self._finish, "evaluate": self._evaluate}
        self._kinds |= {} if sums is None else dict.fromkeys(("share", "mask", "open"), self._sum)

    def close(self) -> None:
        """Let go of the state folder."""
        self.state.close()

    def answer(self, request: bytes) -> bytes:
        """The answer to a request; never raises: an error is an answer that says so."""
        with self._lock:
            try:
                message = unpack_message(request)
                with self._settings():
                    return self._answer(message)
            except (Refused, UserError) as refused:
                self.tell(f"refused what the server asked: {refused}")
                return failure(str(refused), client=self.number, **_accused(refused))
            except Exception as error:  # whatever it is, the server must hear of it, and this client must live on
                why = f"{type(error).__name__}: {error}"  # which may quote samples
                self.tell(f"failed: {why}")
                return failure(why if self.noise is None else UNSAID, client=self.number)

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
        return pack_message({"kind": kind, **who, "round": head.get("round"), **more}, body)

    def _hello(self, message: Message) -> bytes:
        told = message.head.get("task")
        classes = told.get("classes") if isinstance(told, dict) else None
        if classes != list(self.task.classes):
            raise Refused(f"the server's classes are {one_line(classes)[:80]}, here they are {list(self.task.classes)}")
        self.refusal = None
        federation = self.engine.federation
        more: dict[str, Any] = {}
        samples, tests = int(federation.counts[self.number].sum()), len(federation.test(self.number).y)
        if self.noise is not None:  # how many it has would be told without noise: all clients count alike
            samples, tests, more = 1, 0, {"noise": self.noise.noise}
        return self._pack(
            message.head,
            "hello",
            name=self.settings.name,
            samples=samples,
            tests=tests,
            shape=list(federation.shape(self.number)),
            model={"name": self.choice.name, **self.choice.options},
            **more,
        )

    def _train(self, message: Message) -> bytes:
        head = message.head
        round = whole_number(head, "round", 1, self.experiment.rounds)
        stored = self._stored(message, round, lambda down: self._update(down, round))
        if self.sums is None:
            return self._answered(head, stored)
        told = stored.head.get("loss")  # with noise it is not told
        loss = None if told is None else Mean(*(torch.tensor(float(part), dtype=torch.float32) for part in told))
        from protofed.remote.summing import sent_alike  # needs the packages of secure sums

        sent = sent_alike(self.broadcast, message.body)
        public = self.sums.key(head, round, sent, decode(stored.body) if stored.body else (), loss)
        return self._pack(head, "answer", public)

    def _sum(self, message: Message) -> bytes:
        """A later step of a round's secure sum."""
        assert self.sums is not None
        return self._pack(message.head, "answer", self.sums.step(message))

    def _update(self, down: Tree, round: int) -> tuple[Client, dict[str, Any], bytes]:
        if self.noise is not None:
            self.noise.check()
        update = self.engine.update(self.method, self.number, down, round - 1)
        finite = bool(all_finite((update.loss, update.client.params, update.up)))
        client = self._kept(update.client, finite, f"in round {round}")
        up = withhold(update.up, self.engine.federation.counts[self.number], self.min_count)
        loss = [float(update.loss.total), float(update.loss.weight)]
        self.tell(f"round {round}: trained, loss {loss[0] / max(loss[1], 1e-12):.3f}")
        if self.noise is None:
            return client, {"loss": loss}, body_of(up)
        return client, {}, body_of(self.noise.noised(round, up, down))

    def _kept(self, client: Client, finite: bool, when: str) -> Client:
        """A trained client, if its numbers are `finite`; else Refused, or with a privacy budget the client as it was. A
        refusal would answer without noise what a server asks about samples by what it broadcasts."""
        if finite:
            return client
        if self.noise is None:
            raise Refused(f"{when} {NOT_A_NUMBER}")
        self.tell(f"{when} its loss is {NAN}. The server is not told, and this client keeps the state that it had")
        return self.engine.client(self.method, self.number)

    def _finish(self, message: Message) -> bytes:
        """The last phases, and the tests after them."""
        round = whole_number(message.head, "round", self.experiment.rounds + 1, self.experiment.rounds + 1)

        def last(got: Tree) -> tuple[Client, dict[str, Any], bytes]:
            client, loss = self.engine.last(self.method, self.number, got["down"], round - 1)
            client = self._kept(client, bool(all_finite((loss, client.params))), "after the last round")
            self.tell("the last phases are done")
            return client, {}, self._tested(message.head, client, got)

        return self._answered(message.head, self._stored(message, round, last, self._test_form(message.head)))

    def _stored(
        self,
        message: Message,
        round: int,
        work: Callable[[Tree], tuple[Client, dict[str, Any], bytes]],
        form: Tree = None,
    ) -> Message:
        """The answer that was given before to the same request, or a new one; the state it leads to is kept first."""
        run = str(message.head.get("run"))
        asked = json.dumps([message.head.get(key) for key in ("kind", "ask", "confusion")]).encode()
        request = hashlib.sha256(asked + message.body).hexdigest()
        kept = self.state.read(run, round)
        if kept is None or kept.request != request:
            before = self.state.before(run, round)
            down = self._here(read_tree(message.body, self.down if form is None else form, self._most))
            self.engine.clients = {} if before is None else {self.number: self._here(before.client)}
            client, head, body = work(down)
            kept = Kept(round, client, pack_message(head, body), request)
            asked_for = message.head.get("keep")  # as many states as the server can go back, and the one that it leaves
            many = 1 + asked_for if type(asked_for) is int else 0
            self.state.put(run, kept, 0 if before is None else before.round, many)
        return unpack_message(kept.answer)

    def _answered(self, head: dict[str, Any], stored: Message) -> bytes:
        more = {key: value for key, value in stored.head.items() if key not in ("protocol", "protofed")}
        return self._pack(head, "answer", stored.body, **more)

    def _here(self, tree: Tree) -> Tree:
        device = self.engine.federation.device
        return tree_map(lambda tensor: tensor.to(device), tree)

    def _evaluate(self, message: Message) -> bytes:
        head = message.head
        kept = self.state.at(str(head.get("run")), whole_number(head, "round", 0, self.experiment.rounds + 1))
        self.engine.clients = {} if kept is None else {self.number: self._here(kept.client)}
        got = self._here(read_tree(message.body, self._test_form(head), self._most))
        client = self.engine.client(self.method, self.number)
        return self._pack(head, "answer", self._tested(head, client, got))

    def _test_form(self, head: dict[str, Any]) -> Tree:
        """What comes with a request for tests: what the server broadcasts, and the global model if it is tested."""
        ask = head.get("ask")
        if not isinstance(ask, list) or not set(ask) <= {f"{o}/{w}" for o in ("own", "validation") for w in WHO}:
            raise Refused(f"{one_line(ask)[:60]} is nothing that a client is tested on")
        if ask and (self.sums is not None or self.noise is not None):
            why = "privacy.secure_sum" if self.noise is None else "a privacy budget"
            raise Refused(f"it tells no test results: they are of one client, and this experiment has {why}")
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

    def _settings(self) -> AbstractContextManager[None]:
        choice = self.experiment.engine
        return torch_settings(self.engine.in_turn, choice.threads, choice.precision)

    def describe(self) -> str:
        """What it will send: which arrays, shapes, types, bytes, and whether the server sees them singly."""
        with self._lock, self._settings():
            self.engine.clients = {}
            from protofed.remote.client.describe import about_embeddings, describe_upload  # for whoever asks

            down = self._here(self.down)
            said = describe_upload(self.experiment, self.settings, self.engine, down, self.min_count)
            said += about_embeddings(self.choice, self.engine, self.number)
            return said if self.sums is None else f"{said}\n\n{self.sums.describe()}"


def _accused(refused: Exception) -> dict[str, Any]:
    """Whom a member blames for a step of a secure sum, for the head of its answer."""
    accused = list(getattr(refused, "accused", ()))[:MANY]
    return {"accused": accused} if accused else {}
