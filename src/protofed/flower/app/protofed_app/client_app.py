"""Flower starts a process for every message; so this one imports nothing heavy and passes the bytes to the worker."""

import socket

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """The worker's answer to a request."""
    request = message.content["protofed"]["bytes"].data
    answer = ask(str(context.node_config["worker"]), request)
    blob = Array("uint8", (len(answer),), "safetensors", answer)
    return Message(RecordDict({"protofed": ArrayRecord({"bytes": blob})}), reply_to=message)


def ask(path: str, request: bytes) -> bytes:
    """Length and bytes there, length and bytes back."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
        line.sendall(len(request).to_bytes(8, "big") + request)
        with line.makefile("rb") as back:
            length = int.from_bytes(back.read(8), "big")
            answer = back.read(length)
    if not length or len(answer) < length:
        raise ConnectionError("the worker closed the line before it had answered")
    return answer
