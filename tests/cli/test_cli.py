"""The command line as a person uses it: it teaches, it shows, and every mistake is one line and exit code 2."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from command import protofed

SMALL = ["clients=6", "rounds=2", "partition.shots=5", "partition.spread=1", "batch_size=4", "engine.threads=1"]


def good(*words: str) -> str:
    done = protofed(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(*words: str) -> str:
    """The one line of an error; nothing is written."""
    before = sorted(map(str, Path().rglob("*")))
    done = protofed(*words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert sorted(map(str, Path().rglob("*"))) == before
    return done.stderr


def npz(path: str, samples: int = 60, classes: int = 3, shape: tuple[int, ...] = (1, 8, 8)) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(samples) % classes
    x = rng.normal(size=(samples, *shape)).astype(np.float32) + y.reshape(-1, *[1] * len(shape))
    np.savez(path, x_train=x, y_train=y, x_test=x[: samples // 2], y_test=y[: samples // 2])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that is over; tests change copies of it."""
    out = tmp_path_factory.mktemp("finished") / "out"
    good("run", "demo", *SMALL, "--out", str(out))
    return out


def test_run_writes_a_folder_and_shows_the_result() -> None:
    out = good("run", "demo", *SMALL)
    assert "accuracy, mean over clients" in out
    assert "round 2/2" in out
    assert "runs/demo-fedproto-seed0" in out
    assert "partition.png" in out
    again = good("run", "demo", *SMALL)  # a second run gets a folder of its own
    assert "runs/demo-fedproto-seed0-2" in again
    assert "runs/demo-fedproto-seed0-2" in good("run", "demo", *SMALL, "--resume")


@pytest.mark.usefixtures("pictures")
def test_partition_shows_the_split_and_it_can_be_used_again() -> None:
    out = good("partition", "demo", *SMALL, "--out", "split")
    assert Path("split/partition.png").stat().st_size > 10_000
    fingerprint = next(line for line in out.splitlines() if line.startswith("hash: ")).removeprefix("hash: ")
    good("run", "demo", *SMALL[:2], "seed=7", "partition=file", "partition.path=split/partition.npz", "--out", "again")
    assert json.loads(Path("again/summary.json").read_text())["partition"] == fingerprint


@pytest.mark.slow
def test_compare_shows_a_table_and_the_curves() -> None:
    words = ["compare", "local", "fedproto", "method.lam=0.5", *SMALL, "--experiment", "demo", "--seeds", "0,1"]
    words += ["engine=reference", "--jobs", "1", "--out", "c"]
    out = good(*words)
    for text in ("local", "fedproto", "±", "c/compare.png", "c/compare.md"):
        assert text in out
    rows = json.loads(Path("c/compare.json").read_text())
    assert [row["method"] for row in rows] == ["local", "fedproto"]
    seeds = [json.loads(Path(f"c/fedproto-seed{s}/summary.json").read_text())["accuracy_mean"] for s in (0, 1)]
    assert rows[1]["accuracy_mean"] == pytest.approx([np.mean(seeds), np.std(seeds)])
    assert json.loads(Path("c/local-seed0/summary.json").read_text())["method"] == "local"  # which has no lam
    assert "lam = 0.5" in Path("c/fedproto-seed0/experiment.toml").read_text()
    stamp = Path("c/fedproto-seed1/summary.json").stat().st_mtime_ns
    good(*words)  # what is finished is not run again
    assert Path("c/fedproto-seed1/summary.json").stat().st_mtime_ns == stamp


@pytest.mark.parametrize("what", ["methods", "models", "data", "partitions", "experiments"])
def test_list(what: str) -> None:
    entries = json.loads(good("list", what, "--json"))
    names = {entry["name"] for entry in entries}
    expected = {
        "methods": {"local", "fedavg", "fedproto"},
        "models": {"cnn_mnist", "cnn_femnist", "resnet18_s14", "cnn_fednh", "resnet18_gn", "mlp_mpfedcl", "cnn_digits"},
        "data": {"digits", "spiral"},
        "partitions": {
            "nway_kshot", "dirichlet", "dirichlet_mpfedcl", "dirichlet_fedpr", "domain", "natural", "groups", "shards",
            "iid",
        },
        "experiments": {"demo", "fedproto/mnist_n3", "fedproto/mnist_n3_mh"},
    }  # fmt: skip
    assert names >= expected[what]
    shown = good("list", what)
    assert all(name in shown for name in names)
    if what in ("methods", "partitions"):
        assert all(key["about"] for entry in entries for key in entry["keys"]), "every key is explained"
    if what != "data":
        assert all(entry["about"] for entry in entries)
    if what == "methods":
        assert all(entry["paper"] and entry["losses"] for entry in entries)
        assert all(set(entry["presets"]) >= {"paper", "official"} for entry in entries)


def test_help_teaches() -> None:
    assert "protofed run demo" in good("--help")
    said = good("run", "--help")
    assert "Examples" in said
    assert "A .toml file, or a shipped experiment's name" in said  # of an argument
    assert "[env var: PROTOFED_DATA]" in said
    assert "\\[" not in said
    assert "--seeds" in good("compare", "--help")
    assert "protofed explain fedproto" in good("explain", "--help")


@pytest.mark.parametrize("words", [[], ["federation"]])
def test_a_list_of_commands_says_what_each_does_without_breaking_off(words: list[str]) -> None:
    """A terminal of 80 columns has room for the first sentence of each."""
    assert "..." not in good(*words, "--help").partition("Commands:")[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "demo", "out=runs/x"), "out is an option, not a key of the experiment. Write --out runs/x."),
        (("run", "demo", "data_dir=data"), "Write --data-dir data."),
        (("compare", "local", "--experiment", "demo", "seeds=0,1"), "Write --seeds 0,1."),
        (
            ("run", "demo", "seed=0,1,2"),
            "'seed=0,1,2': a run has one seed. Use protofed compare METHOD ... --seeds 0,1,2",
        ),
        (("run", "demo", "seed=[0, 1]"), "--seeds 0,1 for several"),
        (("run", "demo", "--seeds", "0,1"), "no option --seeds here. Write seed=N, or use protofed compare METHOD ..."),
    ],
)
def test_an_option_written_as_a_key_is_named(words: tuple[str, ...], said: str) -> None:
    assert said in refused(*words)
    assert not list(Path().iterdir())


def test_a_sweep_is_not_an_experiment_and_an_experiment_is_not_a_sweep() -> None:
    Path("sweep.toml").write_text('experiment = "demo"\nmethods = ["local"]\n')
    Path("mine.toml").write_text('extends = "demo"\nrounds = 2\n')
    assert "sweep.toml is a sweep, not an experiment. Write: protofed sweep sweep.toml." in refused("run", "sweep.toml")
    assert "mine.toml is an experiment, not a sweep. Write: protofed run mine.toml." in refused("sweep", "mine.toml")
    assert "unknown key rounds in the sweep" in refused("sweep", wrong_sweep())


def test_a_model_that_is_not_there_is_refused_before_a_federation_starts() -> None:
    words = ("federation", "start", "fed", "--with-clients", ".", "--model")
    assert "model.name = 'cnn_digit' is unknown. Did you mean 'cnn_digits'?" in refused(*words, "mlp_digits,cnn_digit")
    assert "fed" in refused(*words, "mlp_digits,cnn_digits")  # known: the folder is what is missing


def wrong_sweep() -> str:
    """A sweep with a key of an experiment: it is still a sweep."""
    Path("wrong.toml").write_text('experiment = "demo"\nmethods = ["local"]\nrounds = 2\n')
    return "wrong.toml"


def test_a_folder_is_not_an_experiment() -> None:
    Path("runs/one").mkdir(parents=True)
    assert "'runs' is a folder, not an experiment. Name a .toml file" in refused("run", "runs")
    Path("runs/one/experiment.toml").write_text("")
    assert "Name runs/one/experiment.toml for the experiment of this run." in refused("run", "runs/one")


def test_explain_says_that_nothing_is_trained() -> None:
    assert "none: the method trains no parameter" in good("explain", "lda", "model=mlp_digits", *SMALL)
    assert "trains no parameter" not in good("explain", "fedproto", *SMALL)


def test_a_data_folder_that_is_not_there_is_not_listed_as_empty() -> None:
    assert "--data-dir nowhere is not a folder" in refused("list", "data", "--data-dir", "nowhere")
    assert "built in" in good("list", "data")


def test_a_report_is_a_page() -> None:
    assert "--out paper.pdf should end in .html" in refused("report", "runs", "--out", "paper.pdf")


def test_explain_says_what_is_sent_and_writes_nothing() -> None:
    out = good("explain", "fedproto", *SMALL)
    for text in ("Losses", "What goes up", "What stays private", "Choices in force", "official"):
        assert text in out
    assert "'fedproto'" in refused("explain", "fedprot")
    assert "cannot be changed in explain" in refused("explain", "fedproto", "method=local")
    assert not list(Path().iterdir())


BAD = {
    "an unknown key": (["method.lamb=1"], ["method.lamb = 1", "'lam'"]),
    "a wrong type": (["rounds=few"], ["rounds = 'few'", "integer"]),
    "out of range": (["participation=2"], ["participation = 2"]),
    "more ways than classes": (["partition.ways=11"], ["partition.ways = 11", "10 classes", "at most 10"]),
    "more shots than a class has": (["partition.shots=100"], ["partition.shots = 100", "class '", "training samples"]),
    "more clients than the data can feed": (
        ["clients=2000", "partition=iid"], ["clients = 2000", "fewer clients"],
    ),
    "a client left without data": (
        ["clients=700", "partition=dirichlet", "partition.alpha=0.01"], ["alpha = 0.01", "fewer clients"],
    ),
    "a model that does not fit": (["model=cnn_mnist"], ["cnn_mnist", "(1, 8, 8)", "cnn_digits"]),
    "fedavg over architectures": (["method=fedavg"], ["needs one architecture", "body.", "fedproto"]),
    "a missing data set": (["data.name=nowhere"], ["'nowhere'", "looked for", "PROTOFED_DATA", "torchvision:NAME"]),
    "no such device": (["device=cuda:77"], ["device = 'cuda:77'", "cpu"]),
    "no such experiment": (None, ["'nothing/here'"]),
    "a missing .npz": (["data.name=no.npz"], ["looked for data/no.npz, no.npz ", "Put no.npz"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_writes_nothing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROTOFED_DATA", raising=False)  # else it looks there
    overrides, parts = BAD[case]
    words = ["run", "nothing/here"] if overrides is None else ["run", "demo", *overrides]
    message = refused(*words, "--out", "out")
    for part in parts:
        assert part in message, message
    if overrides is not None and "data" not in case:  # the same is said without training
        assert not Path("out").exists()


def test_embedding_widths_that_differ() -> None:
    Path("e.toml").write_text('[[model]]\nname = "cnn_digits"\n[[model]]\nname = "mlp_digits"\ndim = 16\n')
    message = refused("run", "e.toml", "partition.shots=5")
    assert "cnn_digits: 32" in message
    assert "16" in message


def test_damaged_data_files() -> None:
    npz("cut.npz")
    Path("cut.npz").write_bytes(Path("cut.npz").read_bytes()[:500])
    assert "cut.npz" in refused("run", "demo", "data.name=cut.npz")
    Path("text.npz").write_text("hello")
    assert "text.npz" in refused("run", "demo", "data.name=text.npz")
    np.savez("no_labels.npz", x_train=np.zeros((3, 8, 8)))
    assert "y_train" in refused("run", "demo", "data.name=no_labels.npz")


def test_an_output_folder_that_holds_another_run(finished: Path) -> None:
    shutil.copytree(finished, "out")
    assert "already holds a finished run" in refused("run", "demo", *SMALL, "--out", "out")
    changed = refused("run", "demo", *SMALL, "optimizer.lr=0.5", "--out", "out", "--resume")
    assert "optimizer.lr 0.05 -> 0.5" in changed


def test_compare_refuses_before_it_runs() -> None:
    assert "fedprot" in refused("compare", "local", "fedprot", "--experiment", "demo")
    assert "--seeds" in refused("compare", "local", "--experiment", "demo", "--seeds", "1,x")
    assert "needs different methods" in refused("compare", "rounds=3", "--experiment", "demo")


def test_data_dir_by_option_and_by_environment() -> None:
    Path("sets").mkdir()
    npz("sets/mine.npz")
    words = ["partition", "demo", "data.name=mine", "clients=3", "partition.ways=2", "partition.shots=3"]
    good(*words, "--data-dir", "sets")

    done = protofed(*words, env={**os.environ, "PROTOFED_DATA": "sets"})
    assert done.returncode == 0, done.stderr
    assert "looked for" in refused(*words)


def test_partition_never_overwrites_a_run(finished: Path) -> None:
    shutil.copytree(finished, "out")
    assert "holds other files" in refused("partition", "demo", *SMALL, "seed=5", "--out", "out")


def test_compare_refuses_what_it_would_have_to_ignore() -> None:
    words = ["--experiment", "demo", *SMALL]
    assert "'seed=7'" in refused("compare", "local", "seed=7", *words)
    assert "'method=local'" in refused("compare", "fedproto", "method=local", *words)
    assert "different methods" in refused("compare", "local", "local", *words)
    assert "'method.nope=1'" in refused("compare", "local", "fedproto", "method.nope=1", *words)
    assert "needs one architecture" in refused("compare", "local", "fedavg", *words)  # before local is trained


def test_resume_needs_something_to_resume() -> None:
    assert "there is no run in typo" in refused("run", "demo", *SMALL, "--out", "typo", "--resume")


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("optimizer.lr=inf", "optimizer.lr = inf"),
        ("batch_size=100000000000000000000", "too large"),
        ("partition.shots=100000000000000000000", "too large"),
        ("engine.threads=100000", "engine.threads = 100000"),
        ("device=cuda:99999999999999999999", "should be auto, cpu, cuda or cuda:N"),
        ("partition.alpha=1e308", "partition.alpha"),
        ("lr=0.1", "optimizer.lr"),
        ("lam=0.1", "method.lam"),
        ("evaluate=3", "should be a table"),
        ("clients=2", "lists 3 models"),
        ("clients=10000000", "clients"),
        ("data.normalize=half", "accuracy"),
    ],
)
def test_odd_values(override: str, part: str) -> None:
    if override == "data.normalize=half":  # digits lie between 0 and 1, so this is fine
        assert part in good("run", "demo", *SMALL, override)
        return
    extra = ["partition=dirichlet"] if "alpha" in override else []
    assert part in refused("run", "demo", *extra, override)


def test_keys_with_dashes_and_files_that_are_missing_are_said_in_one_line() -> None:
    assert "there is no option --rounds. A key of the experiment has no dashes: rounds=VALUE." in refused(
        "run", "demo", "--rounds", "5"
    )
    assert "optimizer.lr=VALUE" in refused("compare", "local", "--optimizer.lr=0.1")
    said = protofed("run", "demo", "--resum").stderr
    assert "Did you mean '--resume'?" in said
    assert len(refused("run", "nofile.toml")) < 200  # not all shipped experiments
    Path("mine.toml").write_text("rounds = 1")
    assert "there is no file 'mime.toml'. Did you mean 'mine.toml'?" in refused("run", "mime.toml")


def test_folders_that_cannot_be_written() -> None:
    Path("file").write_text("")
    for out in ("file/sub", "/proc/protofed", "x" * 300):
        for command in ("run", "partition"):
            assert "error: " in refused(command, "demo", *SMALL, "--out", out)
    assert "--data-dir" in refused("run", "demo", *SMALL, "--data-dir", "nowhere")
