"""The examples run, small: each in its own folder, and say what their pages say they say."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import matplotlib
import numpy as np
import pytest
from checkout import ROOT

from protofed import METHODS

pytestmark = pytest.mark.docs

FOLDER = ROOT / "examples"
PAGE = FOLDER.parent / "docs" / "examples.md"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_hospitals(capsys: pytest.CaptureFixture[str]) -> None:
    module = example("hospitals")
    found = module.main(rounds=3)
    assert set(found) == {"alone", "together"}
    assert all(0.1 < right <= 1 for right in found.values())
    said = capsys.readouterr().out
    assert all(f"hospital {number} " in said for number in range(module.HOSPITALS))
    assert f"the prototype of {module.DISEASES[0]} begins with" in said


def test_real_hospitals(
    real_data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    module = example("real_hospitals")
    monkeypatch.setenv("PROTOFED_DATA", str(tmp_path))
    assert module.main() == {}
    assert f"skipped: there is no {tmp_path}" in capsys.readouterr().out
    np.savez(tmp_path / "heart_disease4.npz", x_train=np.zeros((3, 13)), y_train=np.zeros(3))
    with pytest.raises(SystemExit, match=r"has no x_test \(it has: x_train, y_train\)\. It needs these: .*, sites\."):
        module.main()
    if not (real_data / "heart_disease4.npz").is_file():
        pytest.skip("needs real data: heart_disease4.npz")
    monkeypatch.setenv("PROTOFED_DATA", str(real_data))
    assert list(module.hospitals(real_data / "heart_disease4.npz")) == [
        *("Cleveland", "Budapest", "Switzerland", "Long Beach VA")
    ]
    monkeypatch.setattr(module, "METHODS", ["local", "fedavg"])
    found = module.main(rounds=2, seeds=(0,))
    assert all(0 < area < 1 for area in found.values())
    assert "Switzerland" in capsys.readouterr().out


def test_sensors(capsys: pytest.CaptureFixture[str]) -> None:
    module = example("sensors")
    assert set(module.METHODS) <= set(METHODS)
    found = module.main(rounds=2, methods=["local", "fednh"])
    assert all(0.1 < right <= 1 for right in found.values())
    assert "upside down" in capsys.readouterr().out


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    module = example("text")
    some = module.texts()
    assert all(len(texts) > 100 for texts in some.values())
    assert len(module.numbers("a b")) == module.LENGTH
    found = module.main(rounds=2, methods=("local", "fedproto"))
    assert set(found) == {"local", "fedproto"}
    assert "is about" in capsys.readouterr().out


def test_the_spiral_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    matplotlib.use("Agg")
    cells = json.loads((FOLDER / "spiral.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells if cell["cell_type"] == "code")
    whole = "\n".join(code)
    assert "EPOCHS = 60" in whole
    names: dict[str, object] = {}
    exec(whole.replace("EPOCHS = 60", "EPOCHS = 1"), names)
    assert len(names["outcomes"]) == 4  # type: ignore[arg-type]
    assert capsys.readouterr().out.count("smallest angle") == 4


def test_every_example_is_on_its_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for path in FOLDER.iterdir():
        if path.suffix in (".py", ".ipynb"):
            assert f"examples/{path.name}" in page
