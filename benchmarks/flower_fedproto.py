"""The plain FedProto client on Flower's simulation: two Ray actors, the model in the client's own context.

What a client keeps follows it through `context.state` to whichever actor runs it next; data stay in the actors. Global
prototypes come with the order to train, so a client first measures itself with them: the same numbers as a second trip
after the round would give, without the trip.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import plain_fedproto
import ray
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from torch import Tensor

ACTORS = 2
POLL_SECONDS = 0.005  # the grid's own waiting takes 0.1
END_SECONDS = 60.0  # actors take some three seconds to end
client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Measure what the last round has made, then train."""
    everyone, client, weights, prototypes = _unpack(message, context)
    metrics = {"client": client, "process": os.getpid()}
    if prototypes is not None:
        metrics["accuracy"] = everyone.accuracy(client, weights, prototypes)
    trained = everyone.fit(client, int(message.content.config_records["config"]["round"]), weights, prototypes)
    context.state["model"] = _record(weights=trained.weights)
    sent = _record(prototypes=trained.prototypes, counts=trained.counts)
    return Message(RecordDict({"sent": sent, "metrics": MetricRecord(metrics)}), reply_to=message)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Measure what the last round of all has made."""
    everyone, client, weights, prototypes = _unpack(message, context)
    metrics = {"client": client, "accuracy": everyone.accuracy(client, weights, prototypes)}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


def _unpack(message: Message, context: Context) -> tuple[plain_fedproto.Clients, int, Tensor, Tensor | None]:
    config = message.content.config_records["config"]
    everyone = plain_fedproto.clients(tuple(config["changes"]), config["data-dir"])
    client = int(context.node_config["partition-id"])
    kept = context.state.array_records.get("model")
    weights = everyone.start(client) if kept is None else torch.from_numpy(kept["weights"].numpy())
    known = message.content.array_records.get("global")
    return everyone, client, weights, None if known is None else torch.from_numpy(known["prototypes"].numpy())


def _record(**tensors: Tensor) -> ArrayRecord:
    return ArrayRecord({name: Array(tensor.numpy()) for name, tensor in tensors.items()})


def simulate(changes: tuple[str, ...], data_dir: str, clients: int, rounds: int, after: Callable[[], None]) -> float:
    """All rounds on Flower: mean accuracy at the end; `after` is called between two rounds, while the actors wait."""
    accuracy: list[float] = []
    actors: set[int] = set()
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        while len(nodes := list(grid.get_node_ids())) < clients:
            time.sleep(0.01)
        prototypes = None
        for round in range(rounds + 1):
            content: dict[str, Any] = {
                "config": ConfigRecord({"round": round, "changes": list(changes), "data-dir": data_dir})
            }
            if prototypes is not None:
                content["global"] = _record(prototypes=prototypes)
            kind = MessageType.TRAIN if round < rounds else MessageType.EVALUATE
            replies = _ask(grid, [Message(RecordDict(content), node, kind) for node in nodes])
            if round == rounds:
                accuracy.extend(float(reply.metric_records["metrics"]["accuracy"]) for reply in replies)
                return
            actors.update(int(reply.metric_records["metrics"]["process"]) for reply in replies)
            sent = [reply.array_records["sent"] for reply in replies]
            prototypes = plain_fedproto.average(
                prototypes, [tuple(torch.from_numpy(one[k].numpy()) for k in ("prototypes", "counts")) for one in sent]
            )
            after()

    with _ray() as init_args:
        resources = {"num_cpus": 1, "num_gpus": 0.0}
        run_simulation(server_app, client_app, clients, "ray", {"client_resources": resources, "init_args": init_args})
    _await_end(actors)
    return sum(accuracy) / clients


def _ask(grid: Grid, messages: list[Message]) -> list[RecordDict]:
    """All replies, in the order of the clients' numbers."""
    waiting = set(grid.push_messages(messages))
    replies: list[RecordDict] = []
    while waiting:
        for reply in grid.pull_messages(waiting):
            if reply.has_error():
                raise RuntimeError(f"a client failed: {reply.error.reason}")
            waiting.discard(reply.metadata.reply_to_message_id)
            replies.append(reply.content)
        time.sleep(POLL_SECONDS)
    return sorted(replies, key=lambda content: int(content.metric_records["metrics"]["client"]))


@contextmanager
def _ray() -> Iterator[dict[str, Any]]:
    """How Ray is to start: on this machine alone, with a folder of its own that goes with it."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        os.environ["FLWR_HOME"] = folder
        try:
            yield {
                "num_cpus": ACTORS,
                "_node_ip_address": "127.0.0.1",
                "_temp_dir": folder,
                "object_store_memory": 2**28,
                "log_to_driver": False,
                "logging_level": "error",
            }
        finally:
            ray.shutdown()


def _await_end(processes: set[int]) -> None:
    """Actors outlive Ray's shutdown for a while, and would be in the way of what is timed next."""
    until = time.monotonic() + END_SECONDS
    while any(Path(f"/proc/{process}").exists() for process in processes):
        if time.monotonic() > until:
            raise RuntimeError(f"Ray's actors are still running after {END_SECONDS:.0f} s: {sorted(processes)}")
        time.sleep(0.1)
