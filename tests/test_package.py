"""The wheel and the sdist: complete, the same from both, and enough to run the demo where there is no checkout."""

import os
import re
import site
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from checkout import ROOT

from protofed.version import VERSION

pytest.importorskip("hatchling", reason="needs hatchling: pip install 'protofed[dev]'")

pytestmark = pytest.mark.slow

SOURCES = ROOT / "src" / "protofed"
OURS = re.compile(r"^(PYTHON|PROTOFED|COVERAGE)")  # what could lead a process back to this checkout
FOUND = """
import protofed
from protofed.config.files import configs, shipped_experiments
from protofed.papers.reproduce import published
print(protofed.__file__, configs(), len(shipped_experiments()), len(published.kept()), sep="\\n")
"""


def build(source: Path, folder: Path, *targets: str) -> None:
    words = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), *(w for t in targets for w in ("-t", t))]
    done = subprocess.run(words, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a wheel and an sdist."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder, "wheel", "sdist")
    return folder


def wheel_in(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def test_the_wheel_has_every_file_of_the_package_and_what_is_shipped_with_it(built: Path) -> None:
    files = contents(wheel_in(built))
    expected = {f"protofed/{p.relative_to(SOURCES)}": p for p in SOURCES.rglob("*") if p.is_file()}
    expected |= {f"protofed/configs/{p.relative_to(ROOT / 'configs')}": p for p in (ROOT / "configs").rglob("*.toml")}
    expected["protofed/papers/reproduce/results.json"] = ROOT / "docs" / "results.json"
    expected = {name: path for name, path in expected.items() if "__pycache__" not in name}
    about = f"protofed-{VERSION}.dist-info/"
    assert {name for name in files if not name.startswith(about)} == set(expected)
    assert all(files[name] == path.read_bytes() for name, path in expected.items())
    assert files[f"{about}licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert b"protofed = protofed.cli:main" in files[f"{about}entry_points.txt"]


def test_the_sdist_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    build(source, tmp_path / "again", "wheel")
    assert wheel_in(tmp_path / "again").name == wheel_in(built).name
    assert contents(wheel_in(tmp_path / "again")) == contents(wheel_in(built))


def test_the_demo_runs_from_the_wheel_in_an_empty_environment(built: Path, tmp_path: Path) -> None:
    """Its own packages are this wheel alone; torch and the others are borrowed from the environment of the tests."""
    home = tmp_path / "empty"
    venv.create(home, with_pip=False, symlinks=True)
    python, environment = home / "bin" / "python", {k: v for k, v in os.environ.items() if not OURS.match(k)}
    words = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps", "--no-cache-dir"]
    subprocess.run([sys.executable, *words, str(wheel_in(built))], check=True, env=environment)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    # A folder in a .pth file is searched, but its own .pth files, which lead to this checkout, are not followed.
    (packages / "borrowed.pth").write_text(
        "\n".join(dict.fromkeys([*site.getsitepackages(), sysconfig.get_path("platlib")]))
    )
    found = subprocess.run([python, "-c", FOUND], env=environment, capture_output=True, text=True, check=True)
    where, configs, experiments, numbers = found.stdout.splitlines()
    assert Path(where) == packages / "protofed" / "__init__.py"
    assert Path(configs) == packages / "protofed" / "configs"
    assert int(experiments) == len(list((ROOT / "configs").rglob("*.toml")))
    assert int(numbers) > 10
    words = ["run", "demo", "rounds=2", "clients=3", "--out", "demo"]
    done = subprocess.run(
        [home / "bin" / "protofed", *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert Path("demo/summary.json").is_file()
