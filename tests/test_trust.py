"""Somebody else's run folder, export or experiment is data: what it names is imported only if the user says so."""

import json
import os
import pickle
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import protofed
from federated import small

import protofed as package
from protofed.errors import UserError
from protofed.export import export, of_run
from protofed.export.program import Archive, Program, Unknown, _value
from protofed.report import parts
from protofed.report.live import Live
from protofed.runs.folder import RunFolder
from protofed.runs.loop import run
from protofed.runs.saved import inputs_of_run, read_checkpoint
from protofed.runs.trust import uses

MODULE = """
from pathlib import Path
Path({mark!r}).write_text("imported")
from protofed.methods.fedproto import FedProto as M
"""
COMMANDS = (
    "export {run} --client 0 --out out --no-onnx",
    "join {run} --client 0 --steps 1",
    "attack {run}",
    "explain fedproto --run {run}",
    "run {run}/experiment.toml --out new",
    "partition {run}/experiment.toml --out drawn",
)
OTHER_METHODS = (  # which come in the place of the experiment's own
    "compare local fedproto --experiment {run}/experiment.toml --out both",
    "sweep sweep.toml --out cells",
    "federation init hospitals --clients 3 --host localhost --experiment {run}/experiment.toml method=fedproto",
    "client bundle --data x.npz --dry-run",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, and its export."""
    folder = tmp_path_factory.mktemp("base")
    run(small("model=mlp_digits", "rounds=1"), folder / "run")
    subject, _ = of_run(folder / "run", 0, None)
    export(subject, folder / "model", onnx=False)
    return folder


def somebodys(base: Path, here: Path, key: str) -> tuple[Path, Path]:
    """A run of somebody else that names code, which lies in the folder one works in; and the mark that it leaves."""
    mark = here / "IMPORTED"
    (here / f"somebodys_{key}.py").write_text(MODULE.format(mark=str(mark)))
    folder = here / "theirs"
    shutil.copytree(base / "run", folder)
    path = folder / "experiment.toml"
    text, many = re.subn(rf"(\[{key}\]\nname = ).*", rf'\1"somebodys_{key}:M"', path.read_text(), count=1)
    assert many == 1
    path.write_text(text)
    summary = json.loads((folder / "summary.json").read_text())
    summary["method"] = f"somebodys_{key}:M" if key == "method" else summary["method"]
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder, mark


def bundle(run: Path) -> None:
    """A client's folder, from an operator that means harm."""
    Path("bundle").mkdir()
    shutil.copy(run / "experiment.toml", "bundle")
    Path("bundle/client.toml").write_text('[client]\nnumber = 0\nname = "north"\nserver = "localhost:8443"\n')
    for name in ("key", "key.pub", "ca.crt"):
        Path("bundle", name).write_text("")
        Path("bundle", name).chmod(0o600)


@pytest.mark.parametrize("key", ["method", "model", "data"])
def test_nothing_is_imported_without_trust_and_the_message_says_what_would_be(base: Path, key: str) -> None:
    here = Path.cwd()
    folder, mark = somebodys(base, here, key)
    Path("sweep.toml").write_text(f'experiment = "{folder}/experiment.toml"\nmethods.fedproto = []\n')
    bundle(folder)
    for words in (*COMMANDS, *(() if key == "method" else OTHER_METHODS), OTHER_METHODS[-1]):
        done = protofed(*words.format(run=folder).split())
        assert done.returncode == 2, words
        assert f"{key}.name = 'somebodys_{key}:M'" in done.stderr, words
        assert str(here / f"somebodys_{key}.py") in done.stderr, words
        assert "Nothing of it was imported. Give --trust" in done.stderr, words
        assert not mark.exists(), words
    assert protofed("run", "demo", "--out", str(folder), "--resume").returncode == 2
    assert not mark.exists()


@pytest.mark.parametrize("key", ["method", "model", "data"])
def test_reports_tables_and_the_live_page_import_nothing_and_show_the_run(base: Path, key: str) -> None:
    folder, mark = somebodys(base, Path.cwd(), key)
    shown = protofed("report", str(folder), "--out", "report.html")
    assert shown.returncode == 0, shown.stderr
    assert protofed("table", str(folder)).returncode == 0
    assert Live([folder]).now()
    assert not mark.exists()


def test_with_trust_it_is_said_first_and_remembered(
    base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PROTOFED_HOME", str(tmp_path / "home"))
    folder, mark = somebodys(base, Path.cwd(), "method")
    words = ("export", str(folder), "--client", "0", "--no-onnx")
    done = protofed(*words, "--out", "one", "--trust")
    assert done.returncode == 0, done.stderr
    assert f"note: importing what {folder} names: method.name = 'somebodys_method:M'" in done.stderr
    assert mark.exists()
    (note,) = (tmp_path / "home" / "trusted").glob("*.json")
    assert note.stat().st_mode & 0o777 == 0o600
    assert protofed(*words, "--out", "two").returncode == 0  # it is known now
    module = Path("somebodys_method.py")
    module.write_text(module.read_text() + "# changed\n")
    again = protofed(*words, "--out", "three")
    assert again.returncode == 2  # it is other code
    assert "names code that was not run here before" in again.stderr


def test_what_one_has_run_oneself_is_ones_own(base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PROTOFED_HOME", str(tmp_path / "home"))
    somebodys(base, Path.cwd(), "method")
    plan = small("model=mlp_digits", "rounds=1", "method=somebodys_method:M")
    run(plan, "mine")
    assert protofed("export", "mine", "--client", "0", "--no-onnx", "--out", "out").returncode == 0
    text = Path("mine/experiment.toml").read_text()
    Path("mine/experiment.toml").write_text(re.sub(r"lam = .*", "lam = 7.0", text))  # other options are other code
    assert protofed("export", "mine", "--client", "0", "--no-onnx", "--out", "out2").returncode == 2


def test_a_folder_that_names_what_it_does_not_say_it_names_is_refused(base: Path) -> None:
    folder = Path("theirs")
    shutil.copytree(base / "run", folder)
    text = (folder / "experiment.toml").read_text()
    for odd in ('name = ["mlp_digits", "os:system"]', 'name = "os:system"\ncommand = "touch RAN"'):
        (folder / "experiment.toml").write_text(re.sub(r"(\[model\]\n)name = .*", rf"\1{odd}", text))
        done = protofed("export", str(folder), "--client", "0", "--out", "out", "--no-onnx")
        assert done.returncode == 2
        assert "os:system" in done.stderr
    assert not Path("RAN").exists()


# links


def test_a_run_with_links_in_it_is_neither_read_nor_gone_on_with(base: Path, tmp_path: Path) -> None:
    """Going on appends to rounds.jsonl, and removes checkpoints: through a link, of files anywhere."""
    mine = tmp_path / "mine"
    mine.write_text("precious\n")
    kept = tmp_path / "kept"
    shutil.copytree(base / "run" / "checkpoints", kept)
    before = sorted(path.relative_to(kept) for path in kept.rglob("*"))
    for name, target in (
        ("rounds.jsonl", mine),
        ("checkpoints", kept),
        (".lock", tmp_path / "made"),
        ("clients.jsonl", mine),
    ):
        folder = tmp_path / "theirs"
        shutil.copytree(base / "run", folder)
        (folder / "summary.json").unlink()
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.symlink_to(target)
        with pytest.raises(UserError, match="is a link"):
            run(small("model=mlp_digits", "rounds=1"), folder, resume=True)
        assert mine.read_text() == "precious\n"
        assert sorted(path.relative_to(kept) for path in kept.rglob("*")) == before
        assert not (tmp_path / "made").exists()
        shutil.rmtree(folder)


def test_a_pipe_in_a_checkpoint_is_not_waited_for(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(base / "run", folder)
    path = next(folder.glob("checkpoints/round-000001/state.json"))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match="is not a file"):
        of_run(folder, 0, None)


def test_folders_that_are_no_checkpoints_stand_in_nobodys_way(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(base / "run", folder)
    for name in ("round-x", "round-", "round-\u00b2", "round--1"):
        (folder / "checkpoints" / name).mkdir()
    assert [path.name for path in RunFolder(folder).checkpoints()] == ["round-000001", "round-000000"]
    of_run(folder, 0, None)


# exports


def rewritten(path: Path, change: Any) -> None:
    """The members of a .pt2, changed by name; checksums are those of nobody."""
    with zipfile.ZipFile(path) as old:
        members = [(info.filename, old.read(info)) for info in old.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for name, content in change(members):
            new.writestr(name, content)


class Bad:
    def __reduce__(self) -> Any:
        return os.system, ("touch RAN",)


@pytest.fixture
def model(base: Path) -> Path:
    shutil.copytree(base / "model", "model")
    Path("model/SHA256SUMS").unlink()
    return Path("model")


def refused(folder: Path) -> str:
    done = protofed("predict", str(folder), "x.npy")
    assert done.returncode == 2, (done.returncode, done.stdout)
    assert "Traceback" not in done.stderr
    assert not Path("RAN").exists()
    return done.stderr


def test_exports_hold_no_pickle_and_pickles_in_them_are_not_loaded(model: Path) -> None:
    np.save("x.npy", np.zeros((1, 1, 8, 8)))
    archive = Archive(model / "model.pt2")
    with archive.zip:
        assert all(not archive.read(name).startswith(b"\x80") for name in archive.names)
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.zip.infolist())
    assert protofed("predict", str(model), "x.npy").returncode == 0
    bad = pickle.dumps(Bad())
    samples = f"{archive.root}/data/sample_inputs/model.pt"
    rewritten(model / "model.pt2", lambda members: [*((n, c) for n, c in members if n != samples), (samples, bad)])
    assert protofed("predict", str(model), "x.npy").returncode == 0  # nobody looks there
    assert not Path("RAN").exists()
    older = f"{archive.root}/data/weights/model.pt"
    rewritten(model / "model.pt2", lambda members: [*members, (older, bad)])
    assert "cannot be read" in refused(model)


def graph(change: Any) -> Any:
    def changed(members: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
        return [(n, change(c) if n.endswith("models/model.json") else c) for n, c in members]

    return changed


RELU = b"aten.relu.default"
SPOILT = {
    "another function": (graph(lambda c: c.replace(b"torch.ops." + RELU, b"os.system")), "asks for os.system"),
    "another operation": (graph(lambda c: c.replace(RELU, b"aten.from_file.default")), "from_file"),
    "uninitialised memory": (graph(lambda c: c.replace(RELU, b"aten.empty_like.default")), "empty_like"),
    "cut": (lambda members: members[: len(members) // 2], "cannot be read"),
    "not JSON": (graph(lambda c: c[:-5]), "cannot be read"),
    "deep": (graph(lambda c: b"[" * 100_000), "cannot be read"),
    "a name outside": (lambda members: [*members, ("../../outside", b"x")], "no names of their own"),
    "an absolute name": (lambda members: [*members, ("/tmp/outside", b"x")], "no names of their own"),
    "pickled weights": (
        lambda members: [(n, c.replace(b'"use_pickle": false', b'"use_pickle": true')) for n, c in members],
        "nothing is unpickled",
    ),
    "weights elsewhere": (
        lambda members: [(n, c.replace(b'"path_name": "weight_', b'"path_name": "../weight_')) for n, c in members],
        "nothing is unpickled",
    ),
    "empty": (lambda members: [], "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_export_is_refused_in_a_line(name: str, model: Path) -> None:
    np.save("x.npy", np.zeros((1, 1, 8, 8)))
    before = (model / "model.pt2").read_bytes()
    change, why = SPOILT[name]
    rewritten(model / "model.pt2", change)
    assert (model / "model.pt2").read_bytes() != before
    assert why in " ".join(refused(model).split())


def test_a_compressed_export_is_not_unpacked(model: Path) -> None:
    np.save("x.npy", np.zeros((1, 1, 8, 8)))
    with zipfile.ZipFile(model / "model.pt2", "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("model/models/model.json", b"0" * 50_000_000)
    assert "compressed" in refused(model)


def test_files_that_are_not_what_the_sums_say_are_refused(base: Path) -> None:
    shutil.copytree(base / "model", "model")
    np.save("x.npy", np.zeros((1, 1, 8, 8)))
    for name in ("model.pt2", "about.json"):
        content = Path("model", name).read_bytes()
        Path("model", name).write_bytes(content[:-10] + bytes([content[-10] ^ 1]) + content[-9:])
        assert "it is not what SHA256SUMS says" in refused(Path("model"))
        Path("model", name).write_bytes(content)


def test_samples_with_objects_are_refused(model: Path) -> None:
    np.save("x.npy", np.array([Bad()], dtype=object), allow_pickle=True)
    refused(model)


def test_names_from_elsewhere_do_not_steer_the_terminal(model: Path, base: Path) -> None:
    """Escape sequences clear the screen, hide lines or set titles; the words around them stay."""
    about = json.loads((model / "about.json").read_text())
    odd_names = [f"\x1b[2J\x9b2Jname {number}\x07\u202e\ud800" for number in range(len(about["class_names"]))]
    about["class_names"] = odd_names
    (model / "about.json").write_text(json.dumps(about))
    shape = about["input"]["shape"]
    np.savez("x.npz", x_test=np.zeros((2, *shape), about["input"]["dtype"]))
    done = protofed("predict", str(model), "x.npz")
    assert done.returncode == 0, done.stderr
    assert "name" in done.stdout
    poured = protofed("predict", str(model), "x.npz", "--csv")
    assert poured.returncode == 0, poured.stderr
    assert poured.stdout.count("\r\n") == 3
    assert "name" in poured.stdout
    odd = Path("run\x1b[2J")
    shutil.copytree(base / "run", odd)
    (odd / "rounds.jsonl").write_text("[1]\n")
    told = [
        protofed("report", str(odd), "--out", "report.html"),
        protofed("export", "no run\x1b[2J", "--client", "0", "--out", "made"),
    ]
    assert all(one.returncode == 2 and "run[2J" in one.stderr for one in told)
    for one in (done, poured, *told):
        assert not {"\x1b", "\x9b", "\x07", "\u202e", "\ud800"} & {*one.stdout, *one.stderr}


# what the readers may use

NEVER = re.compile(
    r"\b(import|from) (_?pickle|cPickle|cloudpickle|marshal|shelve|dill|joblib|runpy|ctypes|pty)\b|\bpickle\.\w"
    r"|read_pickle|pickle_module|(?<![\w.])(eval|exec|compile)\(|import_module|exec_module|spec_from_|__import__"
    r"|\b(imported|own_function)\(|from torch(\.\w+)? import .*\bload\b|torch\.(export|jit|package)\.\w*load\("
    r"|torch\.hub|torch\.load(?!\(.*weights_only=True)|allow_pickle=True|yaml\.(load|unsafe)"
    r"|os\.(system|popen|exec|spawn|posix_spawn)|shell=True"
)
OWN = {  # lines of these files that import or run something, which is ours, or the user's own by way of runs/trust.py
    "__init__.py": 2, "cli/lazy.py": 2, "config/registry.py": 1, "data/sources.py": 1, "engines/ray/cluster.py": 1,
    "importing.py": 5, "models/own.py": 2, "remote/flower/processes.py": 2, "runs/selection.py": 1,
}  # fmt: skip


def found(line: str) -> bool:
    return bool(NEVER.search(line))


def test_what_reads_the_wire_and_disks_can_run_nothing() -> None:
    """Nor does anything else, but a few lines: whoever writes another has to say so here."""
    root = Path(package.__file__).parent
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    assert {"remote/form.py", "engines/wire.py", "runs/sealed.py", "export/program.py", "joining/heads.py"} <= set(
        files
    )
    lines = {name: [line for line in path.read_text().splitlines() if found(line)] for name, path in files.items()}
    assert {name: len(some) for name, some in lines.items() if some} == OWN, lines


def test_a_function_that_chooses_clients_needs_trust() -> None:
    assert [use.path for use in uses({"selection": {"rule": "os:system"}})] == ["os:system"]
    assert uses({"selection": {"rule": "size"}}) == []


@pytest.mark.parametrize(
    "line",
    ["import pickle", "x = pickle.loads(b)", "torch.load(path)", "torch.load(path, weights_only=False)", "eval(text)",
     "importlib.import_module(name)", "imported('model', path)", "own_function('key', path, 'what')",
     "np.load(path, allow_pickle=True)", "exec(code)",
     "torch.export.load(path)", "__import__(name)", "yaml.load(text)", "from pickle import loads",
     "torch.jit.load(path)",
     "load = torch.load", "from torch import load", "import cloudpickle", "spec.loader.exec_module(module)",
     "pandas.read_pickle(path)", "os.system(line)", "subprocess.run(line, shell=True)"],
)  # fmt: skip
def test_that_search_finds_what_it_looks_for(line: str) -> None:
    assert found(f"    {line}")
    assert not found("found = torch.load(BytesIO(content), map_location='cpu', weights_only=True)")
    assert not found("model.eval()")
    assert not found("pattern = re.compile(text)")
    assert not found("from safetensors.torch import load, save")


@pytest.mark.parametrize(
    "target",
    ["torch.ops.higher_order.cond", "builtins.print", "torch.ops.aten.set_.source_Storage", "os.system", "",
     "torch.ops.aten.__class__.default", "torch.ops.aten.add.__class__", "torch.ops.aten.from_file.default"],
)  # fmt: skip
def test_operations_are_of_aten_alone(model: Path, target: str) -> None:
    assert Program(model / "model.pt2").steps
    rewritten(model / "model.pt2", graph(lambda c: c.replace(b"torch.ops." + RELU, target.encode())))
    with pytest.raises(Unknown):
        Program(model / "model.pt2")


@pytest.mark.parametrize(
    "argument, expected",
    [
        ({"as_tensor": {"name": "a"}}, "A"),
        ({"as_tensors": [{"name": "a"}, {"name": "b"}]}, ["A", "B"]),
        ({"as_nested_tensors": [[{"name": "a"}], [{"name": "b"}, {"name": "a"}]]}, [["A"], ["B", "A"]]),
        ({"as_optional_tensor": {"as_tensor": {"name": "b"}}}, "B"),
        ({"as_optional_tensors": [{"as_none": True}, {"as_tensor": {"name": "a"}}]}, [None, "A"]),
        ({"as_sym_int": {"as_name": "n"}}, 3),
        ({"as_sym_ints": [{"as_name": "n"}, {"as_int": 5}]}, [3, 5]),
        ({"as_sym_float": {"as_float": 2}}, 2.0),
        ({"as_sym_bool": {"as_bool": True}}, True),
        ({"as_none": True}, None),
        ({"as_int": 7}, 7),
        ({"as_ints": [7, 8]}, [7, 8]),
        ({"as_int_lists": [[7], [8]]}, [[7], [8]]),
        ({"as_bools": [True, False]}, [True, False]),
        ({"as_string": "mean"}, "mean"),
        ({"as_float": "Infinity"}, float("inf")),
        ({"as_floats": ["-Infinity", 1]}, [float("-inf"), 1.0]),
        ({"as_complex": {"real": 1.0, "imag": -2.0}}, 1 - 2j),
        ({"as_scalar_type": 7}, torch.float32),
        ({"as_memory_format": 2}, torch.channels_last),
        ({"as_device": {"type": "cuda", "index": 0}}, torch.device("cpu")),
        ({"as_layout": 7}, torch.strided),
    ],
)
def test_every_kind_of_argument_of_a_graph(argument: dict[str, Any], expected: Any) -> None:
    found = _value(argument, {"a": "A", "b": "B", "n": 3})
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize("argument", [{"as_layout": 1}, {"as_graph": {"name": "a"}}, {"as_custom_obj": {"name": "a"}}])
def test_other_arguments_are_refused_by_their_kind(argument: dict[str, Any]) -> None:
    with pytest.raises(Unknown, match=f"an argument {next(iter(argument))}"):
        _value(argument, {"a": "A"})


def test_archives_of_arrays_that_would_fill_the_memory_are_left_out(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(base / "run", folder)
    with zipfile.ZipFile(folder / "views.npz", "w", zipfile.ZIP_DEFLATED) as bomb, bomb.open("z.npy", "w") as member:
        np.lib.format.write_array_header_1_0(member, {"descr": "<f4", "fortran_order": False, "shape": (2**28,)})
        for _ in range(1024):
            member.write(bytes(2**20))
    done = protofed("report", str(folder), "--out", "report.html")
    assert done.returncode == 0
    assert "views.npz cannot be read" in " ".join(done.stderr.split())
    assert RunFolder(folder).finished


@pytest.mark.parametrize("size", [2**28, 10**12])
def test_a_partition_that_would_fill_the_memory_is_left_out(size: int, base: Path, tmp_path: Path) -> None:
    """Either it unpacks to a gigabyte, or its header says that it is larger than any memory."""
    folder = tmp_path / "theirs"
    shutil.copytree(base / "run", folder)
    with zipfile.ZipFile(folder / "partition.npz", "w", zipfile.ZIP_DEFLATED) as bomb:
        for name in ("fingerprint", "hash", "counts"):
            with bomb.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array_header_1_0(member, {"descr": "<f4", "fortran_order": False, "shape": (size,)})
                for _ in range(1024 if size == 2**28 and name == "fingerprint" else 1):
                    member.write(bytes(2**20))
    assert parts.fingerprint(folder / "partition.npz") == ""
    done = protofed("table", str(folder))
    assert (done.returncode, done.stderr) == (0, "")
    done = protofed("report", str(folder), "--out", "report.html")
    assert done.returncode == 0
    assert "partition.npz cannot be read" in " ".join(done.stderr.split())


@pytest.mark.parametrize("name", ["summary.json", "rounds.jsonl", "environment.json", "clients.jsonl", "classes.json"])
def test_deep_tables_and_endless_numbers_are_no_traceback(name: str, base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(base / "run", folder)
    text = (base / "run" / name).read_text()
    for content in ("[" * 100_000, "{", "[]", re.sub(r"(?<=[:\[] )\d+", "1" * 400, text)):
        (folder / name).write_text(content + "\n")
        assert protofed("report", str(folder), "--out", "report.html").returncode in (0, 2)


INPUTS: dict[str, Any] = {
    "class_names": [None, [1], "abc"], "domains": [None, {}, [1], "x"], "shape": [[], [-1], ["1"], 3, None],
    "range": [[0.0], [0.0, "1"], 1, None], "unit": [0, "1", None, 10**400], "whole": [0, None], "dtype": [1, None],
    "mean": [[], [float("nan")], [10**400], [0.0, 1.0], None], "std": [[0.0], [float("inf")], [1.0, 1.0], 1],
}  # fmt: skip


def test_inputs_of_a_run_that_are_not_as_a_run_writes_them_are_damage(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(base / "run", folder)
    path, saved = folder / "inputs.json", read_checkpoint(folder)
    assert inputs_of_run(saved) == json.loads(path.read_text())
    contents = ["[" * 100_000, "[]", "{"]
    for key, values in INPUTS.items():
        for value in values:
            told = json.loads((base / "run" / "inputs.json").read_text())
            (told if key in told else told["domains"][0])[key] = value
            contents.append(json.dumps(told))
    for content in contents:
        path.write_text(content)
        with pytest.raises(UserError, match=r"inputs\.json is damaged"):
            inputs_of_run(saved)
