"""A run claimed at the SuperLink by the process that serves it, so that Flower's token never leaves this process.

Flower's own superexec starts its ServerApp as a command with the token among its arguments, where every user of the
machine can read it.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import httpx
from flwr.common.constant import SubStatus
from flwr.common.serde import run_from_proto
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity

from protofed.remote.flower.mail import BUSY, MOST_BYTES, TRIES, MailGrid

NAME = "flwr-serverapp"  # what Flower calls this kind of task, and the program that runs it
AGAIN_SECONDS = 0.5
BEAT_SECONDS = 10.0  # the SuperLink ends a run that it has not heard of for 60 s
AWAY = (502, 503, 504)  # the SuperLink's answers when it starts or ends
Returned = TypeVar("Returned")


class RunOver(Exception):
    """The SuperLink does not know this run any more; a new run goes on from the last checkpoint."""


class Patience:
    """Asks again while the SuperLink is away; this takes the place of Flower's invoker, which may wait for minutes."""

    def __init__(self) -> None:
        self.leaving = False  # then nothing is asked twice
        self.tries = TRIES

    def invoke(self, ask: Callable[[], Returned]) -> Returned:
        busy = 0
        while True:
            try:
                return ask()
            except httpx.HTTPStatusError as error:
                status = error.response.status_code
                if status in (401, 403):
                    raise RunOver(f"Flower ended the run ({status})") from None
                busy += status == BUSY
                if self.leaving or busy >= self.tries or status not in (*AWAY, BUSY):
                    raise
            except httpx.TransportError:
                if self.leaving:
                    raise
            time.sleep(AGAIN_SECONDS)


@contextlib.contextmanager
def claimed(address: str, authority: Path | None, run: int, most: int = MOST_BYTES) -> Iterator[MailGrid]:
    """The grid of a run, once this process has it; the SuperLink is told when it ends. `most`: bytes of an answer."""
    certificate, patience = authority.read_bytes() if authority else None, Patience()
    token = _token(address, certificate, run, patience)
    grid = MailGrid(address, certificate is None, certificate, token=token)
    grid._retry_invoker, grid.most = patience, most
    signed, over = RuntimeTokenHttpInterceptor(token=token), threading.Event()
    with (
        contextlib.closing(grid),
        contextlib.closing(_client(address, certificate, patience, signed)) as client,
    ):
        begun = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = begun.task_id, begun.run.run_id
        TaskIdentity.node_id = begun.context.node_id
        grid.set_run(run_from_proto(begun.run))
        threading.Thread(target=_beat, args=[client, over], name="beat", daemon=True).start()
        how = SubStatus.FAILED
        try:
            yield grid
            how = SubStatus.COMPLETED
        finally:
            over.set()
            patience.leaving = True
            with contextlib.suppress(httpx.HTTPError, RunOver):
                client.PushTaskOutput(PushTaskOutputRequest(sub_status=how, details=""))


def _token(address: str, certificate: bytes | None, run: int, patience: Patience) -> str:
    """Claim the run. Tasks of earlier runs that are claimed on the way expire by themselves."""
    with contextlib.closing(_client(address, certificate, patience)) as client:
        while True:
            answer = client.AcquireTask(AcquireTaskRequest(supported_task_types=[NAME]))
            if answer.token and answer.task.run_id == run:
                return str(answer.token)
            if not answer.token:
                time.sleep(AGAIN_SECONDS)


def _client(
    address: str, certificate: bytes | None, patience: Patience, *more: RuntimeTokenHttpInterceptor
) -> RuntimeHttpClient:
    return RuntimeHttpClient.from_server_address(
        address, certificate is None, certificate,
        interceptors=[RuntimeVersionHttpInterceptor(component_name=NAME), *more],
        retry_invoker=patience,
    )  # fmt: skip


def _beat(client: RuntimeHttpClient, over: threading.Event) -> None:
    """Tell the SuperLink that the run is alive, until it ends; the grid's own calls say if it was ended."""
    while not over.wait(BEAT_SECONDS):
        with contextlib.suppress(httpx.HTTPError):
            try:
                client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
            except RunOver:
                return
