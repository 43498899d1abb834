"""A client whose first upload is no number, and which behaves after that: `flower_rogue.py BUNDLE DATA MODEL`."""

import sys
from pathlib import Path
from typing import Any

from protofed.engines.wire import decode, encode
from protofed.federation.protocol import pack, unpack
from protofed.federation.worker import Worker, make_worker
from protofed.flower import client
from protofed.ops.trees import map_nodes


def rogue(bundle: Path, **options: Any) -> Worker:
    worker = make_worker(bundle, **options)
    honest = worker.answer

    def answer(request: bytes) -> bytes:
        message = unpack(honest(request))
        if unpack(request).head["kind"] == "train" and not (bundle / "tried").exists():
            (bundle / "tried").touch()
            worse = map_nodes(lambda mean: mean._replace(total=mean.total * float("nan")), decode(message.body))
            return pack(message.head, encode(worse))
        return pack(message.head, message.body)

    worker.answer = answer  # type: ignore[method-assign]
    return worker


if __name__ == "__main__":
    client.make_worker = rogue
    client.run_client(
        Path(sys.argv[1]), data=sys.argv[2], model=sys.argv[3], min_count=0, state=None, dry_run=False, insecure=False,
        wait=60, tell=lambda line: print(line, flush=True),  # noqa: T201
    )  # fmt: skip
