"""Frozen encoders: their embeddings are computed once, and clients train on these."""

import hashlib
import io
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from protofed.atomic import write_atomically
from protofed.data.domain import Domain
from protofed.data.federation import Federation
from protofed.data.split import Split

SLOW = 2.0  # seconds from which on embeddings are kept on disk
AT_ONCE = 64  # samples in one pass


def embedded(
    federation: Federation,
    domains: Sequence[Domain],
    split: Split,
    bodies: Sequence[nn.Module | None],
    tell: Callable[[str], None],
) -> tuple[list[Domain], Split]:
    """Data whose inputs are the embeddings by each client's frozen body, if it has one."""
    places: dict[tuple[int, str], int] = {}
    found: list[Domain] = []
    owner = []
    hashes = {id(body): _hash(body) for body in bodies if body is not None}
    for client, body in enumerate(bodies):
        number = int(split.domain[client])
        place = (number, hashes[id(body)] if body is not None else "")
        if place not in places:
            places[place] = len(found)
            domain = domains[number]
            parts = [federation.scaled(number, x) for x in (domain.x_train, domain.x_test)]
            if body is not None:
                parts = [_kept(body, place[1], x, federation.device, domain.name, tell) for x in parts]
            found.append(replace(domain, x_train=parts[0].numpy(), x_test=parts[1].numpy()))
        owner.append(places[place])
    return found, replace(split, domain=np.array(owner))


def _hash(body: nn.Module) -> str:
    """Of all weights and the structure of a body."""
    total = hashlib.sha256(repr(body).encode())
    for name, value in body.state_dict().items():
        total.update(name.encode())
        total.update(value.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


def _kept(body: Any, name: str, x: Tensor, device: torch.device, label: str, tell: Callable[[str], None]) -> Tensor:
    """Embeddings (N, D); those that took long are found again on disk."""
    total = hashlib.sha256(f"{name} {x.dtype} {tuple(x.shape)}".encode())
    total.update(np.ascontiguousarray(x.numpy()).data)
    kept = cache() / f"{total.hexdigest()[:40]}.npy"
    if kept.is_file():
        try:
            return torch.from_numpy(np.load(kept))
        except (OSError, ValueError, EOFError):
            tell(f"{kept} is damaged; its embeddings are computed anew")
    started, told_at, parts = time.monotonic(), time.monotonic(), []
    project, body.project = body.project, None
    body.to(device).eval()
    try:
        with torch.no_grad():
            for start in range(0, len(x), AT_ONCE):
                parts.append(body(x[start : start + AT_ONCE].to(device)).float().cpu())
                now = time.monotonic()
                if now - told_at > SLOW:
                    done, told_at = start + AT_ONCE, now
                    left = (now - started) / done * (len(x) - done)
                    tell(f"frozen encoder: {done} of {len(x)} samples of {label} embedded, {max(0, left):.0f} s to go")
    finally:
        body.to("cpu").project = project
    z = torch.cat(parts) if parts else torch.zeros(0, int(body(x.new_zeros(1, *x.shape[1:])).shape[1]))
    if time.monotonic() - started > SLOW:
        write(kept, z.numpy())
    return z


def cache() -> Path:
    """Where embeddings that took long are kept: $PROTOFED_CACHE, else ~/.cache/protofed."""
    return Path(os.environ.get("PROTOFED_CACHE") or Path.home() / ".cache" / "protofed")


def write(path: Path, array: np.ndarray) -> None:
    content = io.BytesIO()
    np.save(content, array)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content.getvalue())
