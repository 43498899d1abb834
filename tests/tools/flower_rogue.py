"""A client whose first upload is no number, and which behaves after that: `flower_rogue.py BUNDLE DATA MODEL`."""

import sys
from pathlib import Path
from typing import Any

from protofed.engines.wire import decode, encode
from protofed.ops.trees import map_nodes
from protofed.remote.client.bundle import make_worker
from protofed.remote.client.worker import ClientWorker
from protofed.remote.flower import client
from protofed.remote.protocol import pack_message, unpack_message


def rogue(bundle: Path, **options: Any) -> ClientWorker:
    worker = make_worker(bundle, **options)
    honest = worker.answer

    def answer(request: bytes) -> bytes:
        message = unpack_message(honest(request))
        if unpack_message(request).head["kind"] == "train" and not (bundle / "tried").exists():
            (bundle / "tried").touch()
            worse = map_nodes(lambda mean: mean._replace(total=mean.total * float("nan")), decode(message.body))
            return pack_message(message.head, encode(worse))
        return pack_message(message.head, message.body)

    worker.answer = answer  # type: ignore[method-assign]
    return worker


if __name__ == "__main__":
    client.make_worker = rogue
    client.run_client(
        Path(sys.argv[1]), data=sys.argv[2], model=sys.argv[3], min_count=0, state=None, dry_run=False, insecure=False,
        wait=60, tell=lambda line: print(line, flush=True),  # noqa: T201
    )  # fmt: skip
