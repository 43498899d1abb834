"""A federation behind a frozen encoder: every client embeds its data once, and the server needs no encoder."""

from pathlib import Path

import pytest
import small_encoder
import torch
from federated import set_up, small, worker, workers
from small_encoder import Filters
from torch.utils._pytree import tree_leaves

from protofed import UserError, run
from protofed.remote.build import no_client, server_domain
from protofed.remote.server.serve import serve
from protofed.remote.settings import Task
from protofed.runs import frozen
from protofed.runs.folder import RunFolder

CHANGES = ("model=small_encoder", "model.adapter=linear", "model.width=32")


@pytest.fixture(autouse=True)
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_encoder.known(monkeypatch)
    monkeypatch.setenv("PROTOFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(frozen, "WORTH", -1.0)


@pytest.mark.parametrize("method", ["fedproto", "fedavg", "lda"])
def test_it_gives_what_the_simulation_gives(method: str, tmp_path: Path) -> None:
    experiment = small(*CHANGES, f"method={method}")
    simulated = run(experiment, tmp_path / "sim")
    server = set_up(tmp_path, experiment)
    said: list[str] = []
    result = serve(server, workers(tmp_path), said.append, pause=0.01)
    alone, _ = RunFolder(tmp_path / "sim").restore()
    together, _ = RunFolder(result.folder).restore()
    assert alone is not None
    assert together is not None
    # the same samples in other batches: convolutions may round differently
    torch.testing.assert_close(tree_leaves(together.server), tree_leaves(alone.server), rtol=1e-4, atol=1e-5)
    assert result.summary["accuracy_mean"] == pytest.approx(simulated.summary["accuracy_mean"], abs=0.02)
    assert not any("refuse" in text for text in said)


def test_a_client_embeds_its_data_once_and_says_so(tmp_path: Path) -> None:
    set_up(tmp_path, small(*CHANGES))
    before = Filters.calls
    one = worker(tmp_path, 0)
    mine = len(one.engine.federation.train(0).y) + len(one.engine.federation.test(0).y)
    assert Filters.calls - before == mine
    said = one.describe()
    assert f"small_encoder is frozen: it embedded all {mine} samples once, on this machine" in said
    assert "(12 numbers each), which stay here" in said
    one.close()
    worker(tmp_path, 0).close()  # started again
    assert Filters.calls - before == mine
    assert "is frozen" not in worker(tmp_path, 1, model="mlp_digits").describe()


def test_a_server_without_test_samples_needs_no_encoder(tmp_path: Path) -> None:
    experiment, before = small(*CHANGES), Filters.calls
    task = Task((1, 8, 8), tuple(map(str, range(10))))
    here = no_client(experiment, server_domain(tmp_path, experiment, task))
    assert here.federation.shape(0) == (12,)
    assert here.specs()[0].dim == 32
    assert Filters.calls == before


def test_frozen_and_trained_models_take_part_together(tmp_path: Path) -> None:
    mixed = 'model=[{name="small_encoder",adapter="linear",width=32},{name="cnn_digits"}]'
    experiment = small(mixed, "data.normalize=none", "method=fedproto")
    said: list[str] = []
    result = serve(set_up(tmp_path, experiment), workers(tmp_path), said.append, pause=0.01)
    assert [line["clients"] for line in result.rounds] == [3, 3], said


def test_augmented_images_and_a_frozen_encoder_do_not_go_together(tmp_path: Path) -> None:
    set_up(tmp_path, small(*CHANGES, 'data.augment=["flip"]'))
    with pytest.raises(UserError, match=r"small_encoder is frozen and sees them once\. Use data\.augment = \[\]"):
        worker(tmp_path, 0)
