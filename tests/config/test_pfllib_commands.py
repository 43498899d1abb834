"""PFLlib's command lines as experiments: what they say, what they leave to their defaults, what has no counterpart."""

import json
import shlex
import tomllib
from pathlib import Path

import numpy as np
import pytest
from command import protofed

from protofed import Experiment, UserError
from protofed.config.pfllib import ALGORITHMS, Translated, translate_pfllib

NATURAL = {"name": "natural", "key": "client", "min_size": 2}


def translated(command: str) -> Translated:
    return translate_pfllib(command, lambda name: NATURAL)


def test_a_command_becomes_an_experiment() -> None:
    found = translated(
        "python -u main.py -data Cifar10 -m CNN -algo FedProto -gr 300 -lbs 16 -lr 0.01 -nc 50 -jr 0.2 -ls 5 -lam 10 "
        "-ld True -ldg 0.95 -eg 5 -did 1 -nnc 3"
    )
    assert found.notes == []
    plan = Experiment.from_dict(found.tables)
    assert (plan.rounds, plan.clients, plan.participation, plan.local_epochs, plan.batch_size) == (300, 50, 0.2, 5, 16)
    assert (plan.optimizer.name, plan.optimizer.lr, plan.optimizer.lr_decay, plan.drop_last) == (
        "sgd",
        0.01,
        0.95,
        True,
    )
    assert (plan.data.name, plan.data.normalize, plan.model[0].name) == ("Cifar10", "none", "cnn_pfllib")
    assert (plan.evaluate.own, plan.evaluate.gm, plan.held_out_clients) == (5, 5, 3)
    assert (plan.method_name, plan.method.candidates, vars(plan.method)["lam"]) == ("fedproto", "all", 10.0)


def test_what_is_not_given_is_what_it_is_there() -> None:
    plan = Experiment.from_dict(translated("main.py").tables)
    assert (plan.rounds, plan.clients, plan.batch_size, plan.optimizer.lr) == (2000, 20, 10, 0.005)
    assert (plan.method_name, plan.data.name, plan.optimizer.lr_decay) == ("fedavg", "MNIST", 1.0)


def test_long_names_and_a_shell_around_them() -> None:
    long = translated(
        "CUDA_VISIBLE_DEVICES=0 nohup python3 -u ../system/main.py --dataset=MNIST --algorithm MOON --mu 2 --tau=0.5 "
        "--device cpu > out 2>&1 &"
    )
    short = translated("-data MNIST -algo MOON -mu 2 -tau 0.5 -dev cpu")
    assert long == short
    moon = {"name": "moon", "mu": 2.0, "temperature": 0.5, "weighting": "samples"}
    assert long.tables["method"] == moon | {"projection": 0}  # theirs has no projection head


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_is_an_experiment(algorithm: str) -> None:
    plan = Experiment.from_dict(translated(f"main.py -algo {algorithm}").tables)
    assert vars(plan.method).get("weighting", "samples") == "samples"  # as their servers average


def test_step_sizes_and_batches_are_the_clients_where_they_are_so_there() -> None:
    tables = translated("main.py -algo FedTGP -lr 0.03 -lbs 16 -se 50 -mart 20 -lam 10").tables["method"]
    assert (tables["server_lr"], tables["server_batch"], tables["server_epochs"], tables["lam"]) == (0.03, 16, 50, 10.0)
    found = translated("main.py -algo FedPAC -lr 0.03 -pls 4")
    assert found.tables["method"] == {"name": "fedpac", "lam": 1.0, "head_lr": 0.03}
    assert found.notes == ["-pls 4 has no effect on FedPAC there, and is left out"]
    gh = {
        "name": "fedgh",
        "server_lr": 0.1,
        "server_batch": 16,
        "scored_by": "newest",
    }  # clients receive, then are tested
    assert translated("main.py -algo FedGH -slr 0.1 -lbs 16").tables["method"] == gh
    assert translated("main.py -algo FedGH -slr 0.1 -lbs 16 -se 3").tables["method"] == gh | {"server_epochs": 3}
    assert translated("main.py -algo FedGH -se 3").notes == []
    assert translated("main.py -algo FedGH -m HtFE8").tables["method"]["server_epochs"] == 1000  # HtFLlib's default
    assert translated("main.py -algo GPFL -lam 0.01 -mu 0.1").tables["method"] == {
        "name": "gpfl", "lam": 0.01, "mu": 0.1, "conditions": "trained", "length": "batch",
    }  # fmt: skip


def test_what_has_no_counterpart_is_named() -> None:
    found = translated("main.py -algo FedAvg -lam 3 -t 5 -ab True -m DNN -go x -ld False -tsr 0.2 --K 7")
    said = "\n".join(found.notes)
    for part in (
        "-t 5 has no counterpart: each seed is a run", "-ab True has no counterpart: see [stopping]",
        "-m DNN has no counterpart: model.name = cnn_pfllib is put in its place",
        "-lam 3 has no effect on FedAvg there", "-ld False is taken as no decay", "-tsr 0.2 has no counterpart",
        "--K 7 has no counterpart: it belongs to a method that is not here", "-go x has no counterpart",
    ):  # fmt: skip
        assert part in said
    assert "lr_decay" not in found.tables["optimizer"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("main.py -data MNIST -zz 1 --learning_rates 3", "^-zz, --learning_rates: no flag of PFLlib's main.py, nor of"),
        ("main.py --lambda 1", "Did you mean --lamda for --lambda"),
        ("main.py -algo SCAFFOLD", r"-algo SCAFFOLD has no counterpart here\. Import a command of FedAvg, Local, "),
        (
            "main.py -algo FedROT",
            r"has no counterpart here\. Did you mean FedROD for FedROT\? Import a command of FedAvg",
        ),
        ("main.py -algo FedPCL", "-algo FedPCL has no counterpart here: its clients train whole models"),
        ("main.py -gr many", r"-gr many should be a whole number\. Correct it"),
        ("main.py -lr", "-lr has no value"),
        ("main.py -lr -gr 5", "-lr has no value"),
        ("main.py MNIST", "'MNIST' is not a flag of PFLlib"),
        ("main.py -jr 2", "participation = 2.0 should be less than or equal to 1"),
        ("main.py -dev tpu", "-dev tpu should be cpu or cuda"),
        ("main.py -ld perhaps", "-ld perhaps should be True or False"),
    ],
)
def test_a_command_that_cannot_be_is_refused_in_one_line(command: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        translated(command)


def test_the_command_writes_a_file_that_runs_on_the_folder_as_it_is() -> None:
    y = np.tile([0, 1], 6)
    for part in ("train", "test"):
        (Path("dataset/Toy") / part).mkdir(parents=True)
        for client in range(2):
            x = (np.random.default_rng(client).normal(size=(12, 1, 16, 16)) + y[:, None, None, None]).astype(np.float32)
            np.savez_compressed(Path("dataset/Toy") / part / f"{client}.npz", data={"x": x, "y": y})
    Path("dataset/Toy/config.json").write_text(json.dumps({"num_clients": 2, "num_classes": 2}))
    quoted = "python main.py -data Toy -m CNN -algo FedProto -gr 1 -nc 2 -did 0 -go first"
    words = shlex.split(quoted)
    made = protofed("import-pfllib", *words, "--out", "mine.toml", "--data-dir", "dataset")
    assert made.returncode == 0, made.stderr
    assert made.stderr.splitlines() == ["note: -go first has no counterpart: the run's folder is --out"]
    assert tomllib.loads(Path("mine.toml").read_text())["partition"] == NATURAL
    done = protofed("run", "mine.toml", "--data-dir", "dataset", "--out", "out")
    assert done.returncode == 0, done.stderr
    again = protofed("import-pfllib", *words, "--out", "mine.toml")
    assert (again.returncode, "mine.toml is there already" in again.stderr) == (2, True)
    shown = protofed("import-pfllib", quoted, "--data-dir", "dataset")
    assert shown.stdout.strip() == Path("mine.toml").read_text().strip()
    missing = protofed("import-pfllib", "main.py -data Other", "--data-dir", "dataset")
    assert "there is no such folder at dataset/Other" in missing.stderr
