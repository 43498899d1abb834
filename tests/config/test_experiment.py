"""Experiments as files: every key is typed, every mistake is one line with its remedy."""

import copy
import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from protofed.config import schema
from protofed.config.experiment import Experiment
from protofed.config.files import EXTENDS, find, override, read_tables, shipped_experiments
from protofed.config.misspelt import refuse_misspelt
from protofed.errors import UserError
from protofed.methods import METHODS
from protofed.methods.fedproto import FedProto
from protofed.runs.loop import run


def write(text: str) -> str:
    Path("e.toml").write_text(text)
    return "e.toml"


@pytest.mark.parametrize("name", shipped_experiments())
def test_every_shipped_experiment_loads_and_survives_its_own_file(name: str) -> None:
    plan = Experiment.load(name)
    assert Experiment.from_dict(tomllib.loads(plan.to_toml())) == plan


def test_a_shipped_experiment_repeats_nothing_of_the_one_it_extends(tmp_path: Path) -> None:
    """Each of its keys changes what the file gives."""
    for name in shipped_experiments():
        raw = tomllib.loads(find(name).read_text())
        if EXTENDS in raw:
            (folder := tmp_path / name).mkdir(parents=True)
            for path in find(name).parent.glob("*.toml"):
                (folder / path.name).write_text(path.read_text())
            for key in keys_of({key: value for key, value in raw.items() if key != EXTENDS}):
                less = copy.deepcopy(raw)
                del functools.reduce(lambda table, part: table[part], key[:-1], less)[key[-1]]
                (folder / "less.toml").write_text(tomli_w.dumps(less))
                assert read_tables(folder / "less.toml") != read_tables(name), f"{name} repeats {'.'.join(key)}"


def keys_of(table: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in table.items():
        yield from keys_of(value, (*above, key)) if isinstance(value, dict) else [(*above, key)]


MISSPELT = (
    "epchs=3", "sizee=3", "method=fedprto", "method=[1]", "model=cnn", "model=['cnn_digits','x']", "extends='x'",
    "partition=dirichlt", "evaluate.evry=1", "data.nam='x'", "attack.rulee=1", "privacy.epsilo=1",
)  # fmt: skip


@pytest.mark.parametrize("word", MISSPELT)
def test_a_misspelt_key_is_refused_in_the_same_words_with_and_without_pytorch(word: str) -> None:
    with pytest.raises(UserError) as whole:
        Experiment.load("demo", word)
    with pytest.raises(UserError) as light:
        refuse_misspelt("demo", word)
    assert str(light.value) == str(whole.value)


@pytest.mark.parametrize("word", ["lr=0.1", "lam=1", "momentum=0.1", "optimizer.lrr=1", "method.lm=1"])
def test_a_key_that_may_be_meant_for_a_section_waits_for_its_class(word: str) -> None:
    refuse_misspelt("demo", word)
    with pytest.raises(UserError, match=r"unknown key .*Did you mean"):
        Experiment.load("demo", word)


def test_what_is_not_misspelt_passes() -> None:
    for name in shipped_experiments():
        refuse_misspelt(name)
    for name in METHODS:
        refuse_misspelt("demo", f"method={name}", f"method.{next(iter(schema.fields(METHODS[name])))}=1")
    refuse_misspelt("demo", "method=own.module:Method", "model=own.module:Net", "partition=flwr:IidPartitioner")


def test_what_is_no_experiment_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"not by dict\. Of a dict of its keys, use Experiment\.from_dict"):
        Experiment.load({"rounds": 3})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="is not an override: write key=value"):
        Experiment.load("demo", {"rounds": 3})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="an experiment is a dict of its keys, not list"):
        Experiment.from_dict(["rounds"])  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"experiment is str\. Load one first"):
        run("demo", "out")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_survives_toml(name: str) -> None:
    plan = Experiment.from_dict({"method": {"name": name}})
    assert plan.method == METHODS[name]()
    assert Experiment.from_dict(tomllib.loads(plan.to_toml())).method == plan.method


def test_the_papers_setting_is_what_the_paper_says() -> None:
    plan = Experiment.load("fedproto/mnist_n3")
    assert (plan.clients, plan.rounds, plan.batch_size, plan.local_epochs) == (20, 100, 8, 1)
    assert (plan.partition.ways, plan.partition.shots, plan.partition.spread) == (3, 100, 2)
    assert (plan.optimizer.lr, plan.optimizer.momentum) == (0.01, 0.5)
    assert isinstance(plan.method, FedProto)
    assert plan.method.lam == 1.0


def test_overrides_change_keys_of_every_kind() -> None:
    plan = Experiment.load(
        "demo",
        "rounds=3",
        "method.lam=0.5",
        "optimizer.lr=1e-3",
        "data.augment=['flip']",
        "drop_last=true",
        "device=cpu",
    )
    assert (plan.rounds, plan.optimizer.lr, plan.data.augment) == (3, 1e-3, ["flip"])
    assert (plan.method.lam, plan.drop_last, plan.device) == (0.5, True, "cpu")  # type: ignore[attr-defined]


def test_naming_another_method_or_partition_starts_from_its_own_defaults() -> None:
    plan = Experiment.load("demo", "method=fedavg", "partition=dirichlet", "partition.alpha=0.1", "model=cnn_digits")
    assert plan.method_name == "fedavg"
    assert plan.partition.alpha == 0.1
    assert [choice.name for choice in plan.model] == ["cnn_digits"]
    kept = Experiment.load("demo", "method=fedproto", "partition.shots=7")
    assert (kept.partition.shots, kept.partition.ways) == (7, 5)


def test_a_name_that_reads_as_a_number_stays_a_name() -> None:
    for word in ("nan", "inf", "1.50"):
        assert override({}, [f"data={word}"]) == {"data": {"name": word}}
    assert override({}, ["partition.path=nan", "seed=1.50"]) == {"partition": {"path": "nan"}, "seed": 1.5}


def test_keys_that_came_later_are_written_only_where_they_are_used() -> None:
    """So experiments without them are agreed on by the same hash as before."""
    usual = Experiment.from_dict({}).to_dict()
    assert "more" not in usual["data"]
    assert "auc" not in usual["evaluate"]
    later = Experiment.from_dict({"data": {"more": ["b"]}, "evaluate": {"auc": "never"}})
    assert later.to_dict()["data"]["more"] == ["b"]
    assert Experiment.from_dict(tomllib.loads(later.to_toml())) == later
    owners: dict[str, Any] = {"name": "natural", "key": "writer"}
    usual = Experiment.from_dict({"partition": owners}).to_dict()
    assert usual["partition"] == {**owners, "min_size": 20, "test_fraction": 0.2}
    later = Experiment.from_dict({"partition": {**owners, "per_class": 3, "test_key": "town"}})
    assert later.to_dict()["partition"]["test_key"] == "town"
    assert Experiment.from_dict(tomllib.loads(later.to_toml())) == later


def test_override_does_not_touch_what_it_was_given() -> None:
    raw = {"method": {"name": "fedproto", "lam": 2.0}}
    assert override(raw, ["method.lam=3", "seed=4"]) == {"method": {"name": "fedproto", "lam": 3}, "seed": 4}
    assert raw == {"method": {"name": "fedproto", "lam": 2.0}}


def test_models_are_dealt_in_blocks_as_the_paper_deals_them() -> None:
    plan = Experiment.load("fedproto/mnist_n3_mh")
    names = [plan.model_of(client).name for client in range(20)]
    assert names == ["cnn_mnist_18"] * 7 + ["cnn_mnist_20"] * 7 + ["cnn_mnist_22"] * 6


def test_models_with_fields_of_their_own() -> None:
    plan = Experiment.load(write('[[model]]\nname = "cnn_mnist"\nchannels = 18\n[[model]]\nname = "cnn_mnist"\n'))
    assert [choice.options["channels"] for choice in plan.model] == [18, 20]
    assert plan.model[0].label == "cnn_mnist(channels=18)"
    assert plan.model[1].label == "cnn_mnist"
    assert Experiment.from_dict(tomllib.loads(plan.to_toml())) == plan


BAD = {
    # what is written: what the line must say
    "rounds=0": ["rounds = 0", "greater than or equal to 1"],
    "rounds=2.5": ["rounds = 2.5", "integer"],
    "rounds=many": ["rounds = 'many'", "integer"],
    "seed=-1": ["seed = -1"],
    "participation=0": ["participation = 0"],
    "participation=1.5": ["participation = 1.5"],
    "round=3": ["round = 3", "'rounds'"],
    "metod.lam=3": ["metod", "'method'"],
    "method.lamb=3": ["method.lamb = 3", "'lam'"],
    "method.lam=-1": ["method.lam = -1"],
    "method.lam=true": ["method.lam = True"],
    "method=fedprot": ["method.name = 'fedprot'", "'fedproto'"],
    "method.aggregation=median": ["method.aggregation = 'median'", "'weighted'"],
    "model=cnn_digit": ["model.name = 'cnn_digit'", "cnn_digits"],
    "model=[]": ["model.name", "no model"],
    "model.chanels=4": ["model.chanels = 4", "channels"],
    "partition=dirichlett": ["partition.name = 'dirichlett'", "'dirichlet'"],
    "partition.alpha=0.1": ["partition.alpha = 0.1", "Known"],
    "optimizer.lr=0": ["optimizer.lr = 0", "greater than 0"],
    "optimizer.momentum=1": ["optimizer.momentum = 1"],
    "optimizer.name=lion": ["optimizer.name = 'lion'", "'adam'"],
    "data.normalize=yes": ["data.normalize = 'yes'", "'auto'"],
    "engine=warp": ["engine.name = 'warp'", "reference"],
    "device=tpu": ["device = 'tpu'"],
    "drop_last=1": ["drop_last = 1", "boolean"],
    "rounds": ["'rounds'", "key=value"],
    "=3": ["key=value"],
    "rounds.x=3": ["rounds.x"],
    "optimizer.lr=nan": ["optimizer.lr = nan", "finite"],
    "method.preset=[{name='paper'}]": ["method.preset = [{'name': 'paper'}] is unknown", "official, paper"],
}


@pytest.mark.parametrize("text", BAD)
def test_a_mistake_is_one_line_with_key_value_and_remedy(text: str) -> None:
    with pytest.raises(UserError) as caught:
        Experiment.load("demo", *(["model=cnn_digits"] if text.startswith("model.") else []), text)
    message = str(caught.value)
    for part in BAD[text]:
        assert part in message, message


def test_inference_by_prototypes_needs_prototypes() -> None:
    with pytest.raises(UserError, match="fedavg does not score by prototypes"):
        Experiment.load("demo", "method=fedavg", "method.inference=proto", "model=cnn_digits")


def test_files_that_are_none() -> None:
    with pytest.raises(UserError, match=r"no experiment 'fedproto/mnist_n'.*'fedproto/mnist_n\d'"):
        find("fedproto/mnist_n")
    with pytest.raises(UserError, match=r"e\.toml is not valid TOML"):
        Experiment.load(write("rounds = = 3"))
    with pytest.raises(UserError, match=r"method = 3 should be a table"):
        Experiment.load(write("method = 3"))
    Path("latin.toml").write_bytes(b"# \xe9\n")
    with pytest.raises(UserError, match="not valid TOML"):
        Experiment.load("latin.toml")
    with pytest.raises(UserError, match="not valid TOML"):
        Experiment.load(write("rounds = " + "[" * 100_000))


def test_no_gpu_where_one_is_asked_for() -> None:
    with pytest.raises(UserError, match="device = 'cuda:99'"):
        Experiment.load("demo", "device=cuda:99").torch_device()


# experiments that extend others


def test_an_experiment_says_only_what_differs_from_the_one_it_extends() -> None:
    Path("base.toml").write_text('rounds = 7\nmodel = "mlp_digits"\n[method]\nlam = 0.5\n[optimizer]\nlr = 0.3\n')
    plan = Experiment.load(write('extends = "base"\nclients = 4\n[optimizer]\nmomentum = 0.1\n'), "rounds=9")
    assert (plan.rounds, plan.clients, plan.method.lam) == (9, 4, 0.5)  # type: ignore[attr-defined]
    assert (plan.optimizer.lr, plan.optimizer.momentum) == (0.3, 0.1)
    assert [choice.name for choice in plan.model] == ["mlp_digits"]
    assert Experiment.load(write('extends = "base.toml"\n')) == Experiment.load("base.toml")


def test_naming_another_method_in_a_file_leaves_the_fields_of_the_first_one() -> None:
    Path("base.toml").write_text('[method]\nname = "fedproto"\nlam = 0.5\n[partition]\nways = 4\n')
    plan = Experiment.load(write('extends = "base"\n[method]\nname = "fedprox"\n[partition]\nshots = 3\n'))
    assert (plan.method_name, plan.partition.ways, plan.partition.shots) == ("fedprox", 4, 3)
    several = write('extends = "base"\nclients = 2\n[[model]]\nname = "mlp_digits"\n[[model]]\nname = "cnn_digits"\n')
    assert [choice.name for choice in Experiment.load(several).model] == ["mlp_digits", "cnn_digits"]


def test_a_shipped_experiment_can_be_extended() -> None:
    plan = Experiment.load(write('extends = "fedproto/mnist_n3"\n[partition]\nways = 4\n'))
    assert plan == Experiment.load("fedproto/mnist_n4")


@pytest.mark.parametrize(
    "text, words",
    [
        ('extends = "e"', "leads back here"),
        ('extends = "../e"', "should name a file in the same folder"),
        ('extends = "/etc/passwd"', "should name a file in the same folder"),
        ("extends = 3", "should name a file in the same folder"),
        ('extends = "fedproto/mnist_n9"', "nor a shipped experiment of that name"),
    ],
)
def test_what_cannot_be_extended(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Experiment.load(write(text))
