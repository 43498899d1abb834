"""What the models of a finished run make of test samples, and which vector stands for a class.

Numbers: `classes`, silhouette of the classes over all clients; `clients`, how often the nearest neighbour within a
class is of the same client, less chance; `agreement`, cosine between two clients' mean embeddings of a class, centred;
`semantics`, cosine of the second and third class's means less that of the second and first; `spread`, mean distance to
the class mean over the mean distance between class means; `distance`, mean square of the distance to the class's
prototype, over the width; `within`, `between`, `gap`, cosine of class vectors.
"""

import dataclasses
import io
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from protofed.atomic import write_atomically
from protofed.config.experiment import Experiment
from protofed.config.sections import EngineChoice
from protofed.data.sources import data_root
from protofed.engines.reference import ReferenceEngine
from protofed.errors import UserError
from protofed.method import Client, Mean
from protofed.methods.fednh import FedNH
from protofed.papers.reproduce.entry import PaperEntry
from protofed.runs.folder import RunFolder
from protofed.runs.setup import prepare
from protofed.runs.trust import experiment_of

OWN, WIDE = 12, 40  # samples of a class that are embedded: of every client, or of the few that are looked at
MOST = 2000  # samples for the silhouette, whose cost is their square
MANY = 10  # clients for numbers about pairs of them


def write_embeddings(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    write_atomically(path, content.getvalue())


def compute(entry: PaperEntry, folder: Path, data_dir: Path | None) -> dict[str, np.ndarray]:
    """Embeddings `z`, `y`, `client`, the class `vectors` of the server and the clients' `own`, `groups` of classes."""
    state, remarks = RunFolder(folder).restore("cpu")
    if state is None or remarks:
        what = "damaged" if remarks else "gone"
        raise UserError(f"its models, which are shown, are {what}. Remove {folder.name} to run it again.")
    plan = experiment_of(RunFolder(folder).experiment_dict(), folder, False, lambda text: None)
    plan = dataclasses.replace(plan, device="cpu", engine=EngineChoice(name="reference"))
    prepared = prepare(plan, data_dir)
    engine = prepared.engine
    assert isinstance(engine, ReferenceEngine)
    figure = entry.figure
    vectors = class_vectors(plan, state.server)
    arrays = {} if vectors is None else {"vectors": vectors}
    if figure is None or figure.kind == "similarity":
        groups = _groups(plan, data_dir)
        return arrays | ({"groups": groups} if groups is not None else {})
    own = not figure.clients
    asked = [c for c in figure.classes if c < engine.federation.classes]
    classes = asked if len(asked) == len(figure.classes) else list(range(min(3, engine.federation.classes)))
    known = sorted(state.clients)
    who = known if own else known[: max(MANY, len(figure.clients))]
    if figure.kind == "plane" and plan.method.prototypes(state.server) is None:
        heads = [head for client in who if (head := _head(state.clients[client])) is not None]
        arrays |= {"own": np.stack(heads)} if len(heads) == len(who) else {}
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for client in who:
        federation = engine.federation
        x, y = federation.test(client) if own else federation.global_test(federation.domain(client))
        rows = _some(y.numpy(), classes or list(range(federation.classes)), OWN if own else WIDE)
        z = engine.model(client).embed(state.clients[client], x[rows])
        z = F.normalize(z) if isinstance(plan.method, FedNH) else z
        parts.append((z.numpy(), y[rows].numpy(), np.full(len(rows), client)))
    embedded, labels, client_of = (np.concatenate(column) for column in zip(*parts, strict=True))
    shown = np.array(classes or sorted(set(labels.tolist())))
    return arrays | {"z": embedded, "y": labels, "client": client_of, "classes": shown}


def _some(y: np.ndarray, classes: list[int], most: int) -> np.ndarray:
    """Rows of these classes, evenly spaced, because neighbouring samples may be alike."""
    rows = [np.flatnonzero(y == c) for c in classes]
    return np.concatenate([of[np.linspace(0, len(of) - 1, min(most, len(of))).astype(int)] for of in rows if len(of)])


def class_vectors(plan: Experiment, server: Any) -> np.ndarray | None:
    """The vectors that samples of a class are compared with: prototypes, or else the rows of the global model's head
    (C, D)."""
    found = server.get("prototypes") if isinstance(server, dict) else server
    if isinstance(found, Mean):
        found = found.value
    if isinstance(found, Tensor):
        vectors: np.ndarray = found.numpy()
        return vectors
    model = plan.method.global_client(server)
    return _head(model) if model else None


def _head(client: Client) -> np.ndarray | None:
    """The rows of the last layer of a client's head (C, D)."""
    heads = [p for name, p in client.params.items() if name.startswith("head.") and p.ndim == 2]
    return heads[-1].numpy() if heads else None


def _groups(plan: Experiment, data_dir: Path | None) -> np.ndarray | None:
    """The superclass of every class, if the data's file tells it (CIFAR-100)."""
    path = data_root(data_dir) / f"{plan.data.name}.npz"
    if not path.is_file():
        return None
    with np.load(path, allow_pickle=False) as arrays:
        return arrays["coarse_of_fine"].astype(np.int64) if "coarse_of_fine" in arrays else None


def embedding_numbers(view: Mapping[str, np.ndarray]) -> dict[str, float | None]:
    """Every number that the arrays allow."""
    from sklearn.metrics import silhouette_score  # a library that takes a second to load

    found: dict[str, float | None] = {}
    if "groups" in view and "vectors" in view:
        found |= _similarity(view["vectors"], view["groups"])
    if "z" in view:
        z, y, client = view["z"].astype(np.float64), view["y"], view["client"]
        if len(set(y.tolist())) > 1:
            found["classes"] = float(silhouette_score(z, y, sample_size=min(len(z), MOST), random_state=0))
        found["clients"] = _same_client(z, y, client)
        found["agreement"] = _agreement(z, y, client)
        found["spread"] = _spread(z, y, client)
        if "vectors" in view and view["vectors"].shape[1:] == z.shape[1:]:
            found["distance"] = float(np.square(z - view["vectors"][y]).mean())
        if len(view["classes"]) == 3:
            found["semantics"] = _semantics(z, y, client, view["classes"])
    return found


def row_cosines(vectors: np.ndarray) -> np.ndarray:
    """Cosine of every two rows (C, C)."""
    rows = vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(min=1e-12)
    products: np.ndarray = rows @ rows.T
    return products


def _similarity(vectors: np.ndarray, groups: np.ndarray) -> dict[str, float | None]:
    cosine = row_cosines(vectors.astype(np.float64))
    upper = np.triu(np.ones_like(cosine, dtype=bool), 1)
    same = (groups[:, None] == groups[None]) & upper
    within, between = float(cosine[same].mean()), float(cosine[upper & ~same].mean())
    return {"within": within, "between": between, "gap": within - between}


def _means(z: np.ndarray, y: np.ndarray) -> dict[int, np.ndarray]:
    return {int(c): z[y == c].mean(0) for c in np.unique(y)}


def _same_client(z: np.ndarray, y: np.ndarray, client: np.ndarray) -> float | None:
    """The share of samples whose nearest neighbour in the class belongs to the same client, averaged over classes,
    minus the share expected by chance."""
    from sklearn.neighbors import NearestNeighbors  # a library that takes a second to load

    gains = []
    for c in np.unique(y):
        rows = y == c
        if rows.sum() < 3 or len(set(client[rows].tolist())) < 2:
            continue
        near = NearestNeighbors(n_neighbors=2).fit(z[rows]).kneighbors(return_distance=False, n_neighbors=1)[:, 0]
        counts = np.unique(client[rows], return_counts=True)[1]
        chance = float((counts * (counts - 1)).sum() / (rows.sum() * (rows.sum() - 1)))
        gains.append(float((client[rows][near] == client[rows]).mean()) - chance)
    return float(np.mean(gains)) if gains else None


def _agreement(z: np.ndarray, y: np.ndarray, client: np.ndarray) -> float | None:
    found = []
    by_client = {c: _means(z[client == c], y[client == c]) for c in np.unique(client)}
    for a, b in combinations(by_client, 2):
        shared = sorted(set(by_client[a]) & set(by_client[b]))
        if len(shared) > 1:
            left, right = (np.stack([by_client[one][c] for c in shared]) for one in (a, b))
            left, right = left - left.mean(0), right - right.mean(0)
            norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
            found += ((left * right).sum(1) / norms.clip(min=1e-12)).tolist()
    return float(np.mean(found)) if found else None


def _spread(z: np.ndarray, y: np.ndarray, client: np.ndarray) -> float | None:
    ratios = []
    for one in np.unique(client):
        means = _means(z[client == one], y[client == one])
        away = [float(np.linalg.norm(a - b)) for a, b in combinations(means.values(), 2)]
        inside = [
            float(np.linalg.norm(row - means[int(c)]))
            for row, c in zip(z[client == one], y[client == one], strict=True)
        ]
        if away and np.mean(away) > 0:
            ratios.append(float(np.mean(inside) / np.mean(away)))
    return float(np.mean(ratios)) if ratios else None


def _semantics(z: np.ndarray, y: np.ndarray, client: np.ndarray, classes: np.ndarray) -> float | None:
    found = []
    for one in np.unique(client):
        means = _means(z[client == one], y[client == one])
        if all(int(c) in means for c in classes):
            cosine = row_cosines(np.stack([means[int(c)] for c in classes]))
            found.append(float(cosine[1, 2] - cosine[1, 0]))
    return float(np.mean(found)) if found else None
