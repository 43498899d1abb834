"""Which prototypes a client is scored with: those it downloaded, or the server's newest."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.method import Batch, Client, LocalData, Mean, Method, Spec
from protofed.methods.fednh import FedNH
from protofed.methods.fedpr import FedPR
from protofed.methods.fedproto import FedProto

X = torch.tensor([[3.0, 1.0]])
OLD = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
NEW = OLD.flip(0)  # the server has exchanged the two classes since


class Identity:
    """A network that embeds a sample as itself."""

    def __call__(self, client: Client, x: Tensor, at: str = "") -> tuple[Tensor, Tensor]:
        return x, x

    def embed(self, client: Client, x: Tensor, at: str = "") -> Tensor:
        return x

    def classify(self, client: Client, z: Tensor, at: str = "") -> Tensor:
        return z


SPEC = Spec("identity", 2, 2, {"body.w": torch.zeros(1)}, {}, 0)
DATA = LocalData([Batch(X, torch.tensor([0]), torch.ones(1))], torch.tensor([1.0, 0.0]), torch.zeros(2))


def down(method: Method, rows: Tensor, weight: Tensor | None = None) -> object:
    if isinstance(method, FedProto):
        return Mean(rows, torch.ones(2) if weight is None else weight)
    return {"body": {"params": {"body.w": torch.zeros(1), "scale": torch.ones(())}, "buffers": {}}, "prototypes": rows}


def said(method: Method, client: Client, rows: Tensor) -> int:
    scores = method.predict(Identity(), client, X, down(method, rows))[method.scores[-1]]  # type: ignore[arg-type]
    return int(scores.argmax())


@pytest.mark.parametrize("kind", [FedNH, FedProto])
def test_a_client_is_scored_with_what_it_downloaded(kind: type[FedNH] | type[FedProto]) -> None:
    method = kind(scored_by="downloaded")
    first = method.init_client(SPEC)
    client = method.receive(Identity(), first, DATA, down(method, OLD))
    _, kept = method.upload(Identity(), client, DATA, down(method, OLD))
    assert said(method, kept, NEW) == 0, "the prototypes of the round it took part in"
    assert said(method, first, NEW) == 1, "a client that was never drawn has only the newest"
    assert first.memory.keys() == kept.memory.keys() == {"downloaded", "known"}, "so that both can be stacked"


@pytest.mark.parametrize("kind", [FedNH, FedProto])
def test_what_it_downloads_next_takes_the_place_of_what_it_had(kind: type[FedNH] | type[FedProto]) -> None:
    method = kind(scored_by="downloaded")
    client = method.init_client(SPEC)
    for rows, expected in ((OLD, 0), (NEW, 1), (OLD, 0)):
        client = method.receive(Identity(), client, DATA, down(method, rows))
        _, client = method.upload(Identity(), client, DATA, down(method, rows))
        assert said(method, client, rows.flip(0)) == expected


def test_a_class_that_the_server_has_forgotten_is_forgotten_with_the_next_download() -> None:
    method, one = FedProto(scored_by="downloaded"), torch.tensor([0.0, 1.0])
    client = method.receive(Identity(), method.init_client(SPEC), DATA, down(method, OLD))
    client = method.receive(Identity(), client, DATA, down(method, OLD * one[:, None], one))
    assert method.prototypes_of(client, Mean(OLD * one[:, None], one)).weight.tolist() == [[0], [1]]


@pytest.mark.parametrize("kind", [FedNH, FedProto])
def test_or_with_the_newest(kind: type[FedNH] | type[FedProto]) -> None:
    method = kind(scored_by="newest")
    client = method.receive(Identity(), method.init_client(SPEC), DATA, down(method, OLD))
    assert said(method, client, NEW) == 1
    assert not client.memory, "nothing is kept that nobody asks for"
    assert not method.init_client(SPEC).memory


def test_the_global_model_of_fednh_has_the_newest() -> None:
    method = FedNH()
    server = {"body": {"params": {"body.w": torch.zeros(1)}, "buffers": {}}, "prototypes": NEW}
    whole = method.global_client(server)
    assert said(method, whole, NEW) == 1
    assert torch.equal(method.prototypes_of(whole, server).total, NEW[:, None])


@pytest.mark.parametrize("kind", [FedNH, FedProto])
@pytest.mark.parametrize(("scored_by", "expected"), [("downloaded", OLD), ("newest", NEW)])
def test_which_prototypes_those_are(kind: type[FedNH] | type[FedProto], scored_by: Any, expected: Tensor) -> None:
    method = kind(scored_by=scored_by)
    server: Any = down(method, NEW)
    first = method.init_client(SPEC)
    client = method.receive(Identity(), first, DATA, down(method, OLD))
    for who, rows in ((client, expected), (first, NEW)):
        found = method.prototypes_of(who, server)
        assert torch.equal(found.total, rows[:, None])
        assert found.weight.tolist() == [[1], [1]]
    assert torch.equal(method.prototypes(server).total, NEW[:, None]), "the server's are the newest"


def test_a_method_scores_clients_with_the_servers_prototypes_unless_it_says_otherwise() -> None:
    method = FedPR()
    server = {"model": {"params": {}, "buffers": {}}, "prototypes": Mean(NEW, torch.ones(2))}
    found = method.prototypes_of(Client({}, {}), server)
    assert found is not None
    assert torch.equal(found.total, NEW[:, None])


def test_a_class_without_a_downloaded_prototype_has_the_newest() -> None:
    method = FedProto(scored_by="downloaded")
    known = torch.tensor([0.0, 1.0])  # class 0 had none in that round
    client = method.receive(Identity(), method.init_client(SPEC), DATA, down(method, 10 * OLD * known[:, None], known))
    scores = method.predict(Identity(), client, X, down(method, NEW))["proto"]  # type: ignore[arg-type]
    expected = [-F.mse_loss(X[0], NEW[0]).item(), -F.mse_loss(X[0], 10 * OLD[1]).item()]
    assert scores[0].tolist() == pytest.approx(expected)


def test_a_downloaded_prototype_may_be_the_origin() -> None:
    """A network that ends with a ReLU may embed all samples of a class there."""
    method, origin = FedProto(scored_by="downloaded"), torch.tensor([[0.0, 0.0], [9.0, 9.0]])
    client = method.receive(Identity(), method.init_client(SPEC), DATA, down(method, origin))
    assert said(method, client, torch.tensor([[9.0, 9.0], [3.0, 1.0]])) == 0
    scores = method.predict(Identity(), client, X, down(method, NEW, torch.zeros(2)))["proto"]  # type: ignore[arg-type]
    assert scores[0].tolist() == pytest.approx([-5.0, -50.0]), "also where the server has forgotten it since"


def test_who_is_judged_by_what_it_downloaded_by_default() -> None:
    assert (FedNH().scored_by, FedProto().scored_by) == ("downloaded", "newest")
