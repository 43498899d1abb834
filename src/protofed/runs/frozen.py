"""Frozen encoders: their embeddings are computed once, and clients train on these."""

import fcntl
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from protofed.atomic import write_atomically
from protofed.config.registry import ModelChoice
from protofed.data.batches import Federation
from protofed.data.domain import Domain
from protofed.data.scaling import Scaler
from protofed.data.split import Split
from protofed.engines.resources import cache_folder
from protofed.errors import UserError
from protofed.importing import code_fingerprint, path_of

SLOW = 2.0  # seconds between two words on how it gets on
WORTH = 0.5  # seconds of work from which on embeddings are kept on disk
AT_ONCE = 64  # samples in one pass

Tell = Callable[[str], None]


def embedded(
    federation: Federation, domains: Sequence[Domain], split: Split, bodies: Sequence[nn.Module | None], tell: Tell
) -> tuple[list[Domain], Split]:
    """Data whose inputs are the embeddings by each client's frozen body, if it has one."""
    places: dict[tuple[int, str], int] = {}
    found: list[Domain] = []
    owner = []
    hashes = {key: hash_of_body(body) for key, body in {id(body): body for body in bodies if body is not None}.items()}
    for client, body in enumerate(bodies):
        number = int(split.domain[client])
        place = (number, hashes[id(body)] if body is not None else "")
        if place not in places:
            places[place] = len(found)
            domain = domains[number]
            parts = [federation.scaled(number, x) for x in (domain.x_train, domain.x_test)]
            if body is not None:
                parts = [embeddings(body, place[1], x, federation.device, domain.name, tell) for x in parts]
            found.append(_with(domain, parts))
        owner.append(places[place])
    return found, replace(split, domain=np.array(owner))


def embedded_domain(choice: ModelChoice, domain: Domain, device: torch.device, tell: Tell) -> Domain:
    """One data set with its embeddings by a frozen encoder that comes with its weights; without samples, no weights are
    needed."""
    parts = [domain.x_train, domain.x_test]
    dim = choice.encoder_width
    if not any(map(len, parts)):
        return _with(domain, [torch.zeros(0, dim)] * 2)
    refuse_unfit([choice], [domain])
    whole: Any = choice(domain.shape, domain.classes)
    name, scale = hash_of_body(whole.body), Scaler.of(domain, "none")
    return _with(domain, [embeddings(whole.body, name, scale(x), device, domain.name, tell) for x in parts])


def _with(domain: Domain, parts: Sequence[Tensor]) -> Domain:
    train, test = (part.numpy() for part in parts)
    return replace(domain, x_train=train, x_test=test, scale=None)


def refuse_unfit(choices: Sequence[ModelChoice], domains: Sequence[Domain]) -> None:
    """Refuse data that a pretrained encoder cannot take."""
    for choice in choices:
        for domain in domains:
            for x in (domain.x_train, domain.x_test):
                if why := choice.unfit_data(x, domain.shape):
                    raise UserError(f"data.name = {domain.name!r}: {why}.")


def hash_of_body(body: Any) -> str:
    """Of the weights and the structure of a body, without what is trained behind it, and of its code as far as it can
    be told."""
    net, embedding = body.net, body.embedding
    total = hashlib.sha256(
        repr((net, _told(embedding), body.cast, code_fingerprint(path_of(type(net)) or ""))).encode()
    )
    for name, value in net.state_dict().items():
        total.update(name.encode())
        total.update(value.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


def _told(embedding: Any) -> Any:
    """What distinguishes one embedding of a module from another: a layer's name, or a function's code."""
    code = getattr(embedding, "__code__", None)
    return embedding if isinstance(embedding, str) else code and (code.co_code, code.co_names, repr(code.co_consts))


def embeddings(body: Any, name: str, x: Tensor, device: torch.device, label: str, tell: Tell) -> Tensor:
    """Embeddings (N, D) of inputs by a body with this hash. Results of long computations are kept on disk under both
    hashes, and any run finds them again. If several need the same one at once, one computes it."""
    total = hashlib.sha256(f"{name} {x.dtype} {tuple(x.shape)}".encode())
    total.update(np.ascontiguousarray(x.numpy()).data)
    key = total.hexdigest()
    kept = cache_folder() / f"{key[:40]}.embeddings"
    if (found := _read(kept, key, len(x), tell)) is not None:
        return found
    with _alone(kept.with_suffix(".lock")):
        if (found := _read(kept, key, len(x), tell)) is not None:
            return found
        started = time.monotonic()
        z = _computed(body, x, device, label, tell)
        if time.monotonic() - started > WORTH:
            _keep(kept, key, z, tell)
    return z


def _computed(body: Any, x: Tensor, device: torch.device, label: str, tell: Tell) -> Tensor:
    started = told_at = time.monotonic()
    parts = []
    project, body.project = body.project, None
    body.to(device).eval()
    try:
        with torch.no_grad():
            for start in range(0, len(x), AT_ONCE):
                parts.append(body(x[start : start + AT_ONCE].to(device)).float().cpu())
                now = time.monotonic()
                if now - told_at > SLOW:
                    done, told_at = min(start + AT_ONCE, len(x)), now
                    left = (now - started) / done * (len(x) - done)
                    tell(f"frozen encoder: {done} of {len(x)} samples of {label} embedded, {left:.0f} s to go")
            return torch.cat(parts) if parts else body(x.new_zeros(1, *x.shape[1:]).to(device)).float().cpu()[:0]
    finally:
        body.to("cpu").project = project


def _read(path: Path, key: str, rows: int, tell: Tell) -> Tensor | None:
    """What is kept on disk; None if there is nothing, or not what was written for this key."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            about, z = file.metadata() or {}, file.get_tensor("z")
        if about.get("of") != key:
            raise ValueError("it is of other samples or of another encoder")
        if z.dtype != torch.float32 or z.ndim != 2 or len(z) != rows:
            raise ValueError(f"it has {z.dtype} of shape {tuple(z.shape)}, where {rows} embeddings are expected")
        if about.get("sha256") != _digest(z):
            raise ValueError("it is not what was written")
    except (OSError, ValueError, SafetensorError) as error:
        tell(f"the embeddings in {path} cannot be used ({error}), and are computed again")
        return None
    found: Tensor = z
    return found


def _keep(path: Path, key: str, z: Tensor, tell: Tell) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, save({"z": z.contiguous()}, {"of": key, "sha256": _digest(z)}))
    except OSError as error:
        tell(f"embeddings cannot be kept in {path.parent} ({error}): another run computes them again")


def _digest(z: Tensor) -> str:
    return hashlib.sha256(np.ascontiguousarray(z.numpy()).data).hexdigest()


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock, so that only one process computes at a time; several if no file can be locked."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path, "a", encoding="utf-8")  # noqa: SIM115  (closed below)
    except OSError:
        yield
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
