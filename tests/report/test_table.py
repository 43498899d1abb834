"""Tables of runs: which number, over which seeds, what is marked, and what is left out, against numbers by hand."""

import csv
import io
import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import protofed
from rich.console import Console

from protofed import Experiment, UserError, run
from protofed.atomic import write_atomically
from protofed.cli.sweep import table_of
from protofed.report import paired, render
from protofed.report.columns import Column, by_rule
from protofed.report.gather import collect
from protofed.report.labels import short_labels
from protofed.report.rows import Table
from protofed.report.runs import read_finished
from protofed.report.tabulate import tabulate
from protofed.runs.environment import own_code
from protofed.runs.folder import RunFolder
from protofed.version import VERSION


def folder(
    path: str, accuracy: float = 0.5, *changes: str, partition: str = "p", rounds: list[dict[str, Any]] | None = None
) -> Path:
    """A finished run with these numbers, as `run` leaves it."""
    plan = Experiment.load("demo", *changes)
    here = RunFolder(Path(path))
    here.path.mkdir(parents=True)
    here.write("experiment.toml", plan.to_toml())
    here.write_json("environment.json", {"protofed": VERSION})
    lines = rounds or [{"round": plan.rounds}]
    for line in lines:
        here.append_round(line)
    numbers = {"accuracy_mean": accuracy, "accuracy_std": 0.1, "accuracy_worst10": accuracy / 2, "seconds": 3.0}
    about = {
        "method": plan.method_name,
        "seed": plan.seed,
        "rounds": lines[-1]["round"],
        "partition": f"{partition}{plan.seed}",
    }
    how = {"inference": "head", "candidates": "all", "params_up_per_round": 3100.0}
    here.write_json("summary.json", numbers | about | how)
    return here.path


def rows(values: dict[str, list[float | None]], out: str = "runs") -> Path:
    """One run for each method and seed."""
    for method, numbers in values.items():
        for seed, number in enumerate(numbers):
            if number is not None:
                folder(f"{out}/{method}-{seed}", number, f"method={method}", f"seed={seed}")
    return Path(out)


# statistics


def test_paired_by_hand() -> None:
    found = paired.paired_test({0: 2.0, 1: 4.0, 2: 6.0, 9: 5.0}, {0: 1.0, 1: 2.0, 2: 3.0, 7: 1.0})
    assert found is not None
    assert (found.n, found.difference, found.higher) == (3, 2.0, 3)  # only the seeds both have: gains 1, 2, 3
    t = 2 / (1 / math.sqrt(3))
    assert found.p == pytest.approx(1 - t / math.sqrt(t * t + 2))  # the t distribution of two degrees, in closed form
    assert found.low == pytest.approx(2 - 4.302653 / math.sqrt(3))
    assert found.high == pytest.approx(2 + 4.302653 / math.sqrt(3))
    assert found.p_wilcoxon is None  # with three seeds it could not fall below 0.25
    assert paired.paired_test({0: 1.0}, {1: 1.0}) is None


def test_nothing_is_tested_where_there_is_no_spread() -> None:
    for row, base in (({0: 2.0}, {0: 1.0}), ({0: 2.0, 1: 3.0}, {0: 1.0, 1: 2.0}), ({0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0})):
        found = paired.paired_test(row, base)
        assert found is not None
        assert found.p is None
        assert not found.marked


def test_signed_ranks_where_they_can_say_something() -> None:
    gains = {seed: float(gain) for seed, gain in enumerate([1, 2, 3, 4, 5, 6])}
    found = paired.paired_test(gains, dict.fromkeys(gains, 0.0))
    assert found is not None
    assert found.p_wilcoxon == pytest.approx(2 / 2**6)  # all six above: one of 64 ways, two-sided


def test_holm_by_hand() -> None:
    tests = [paired.Paired(5, 1.0, 5, p=p) for p in (0.04, 0.01, 0.03)]
    assert [t.p_holm for t in paired.holm([*tests, None])[:3] if t] == pytest.approx([0.06, 0.03, 0.06])


def test_a_star_needs_seeds_enough() -> None:
    base = [0.50, 0.51, 0.52, 0.53, 0.54]
    sure = [value + 0.1 + 0.001 * (seed % 2) for seed, value in enumerate(base)]
    table = tabulate(collect(rows({"local": base, "fedproto": sure})), "accuracy", "local")
    entry = table.rows[0].entries["", "accuracy"]
    assert entry.test is not None
    assert entry.test.p is not None
    assert entry.test.p < 1e-5
    assert r"+10.04\*, p < 0.001, 5/5" in render.markdown(table)
    mixed = {"local": base, "fedproto": sure, "fedper": [0.5, *[None] * 4]}
    said = tabulate(collect(rows(mixed, "mixed")), "accuracy", "local").notes
    assert any("*: p below 0.05" in note and "With 1 seed p is a hint" in note for note in said), "both are said"
    few = tabulate(collect(rows({"local": base[:3], "fedproto": sure[:3]}, "few")), "accuracy", "local")
    assert few.rows[0].entries["", "accuracy"].test.p < 0.001  # type: ignore[union-attr, operator]
    text = render.markdown(few)
    assert "+10.03, p < 0.001, 3/3" in text
    assert "With 3 seeds p is a hint at most" in text
    assert "nothing is starred below 5 seeds" in text


# what a table shows


def test_mean_deviation_and_ranks_by_hand() -> None:
    values: dict[str, list[float | None]] = {
        "local": [0.10, 0.30],
        "fedproto": [0.50, 0.70],
        "fedper": [0.40, 0.80001],  # reads as fedproto does
        "fedrep": [0.55, 0.55],
        "ditto": [0.99, None],  # its one seed is not those of the others
    }
    table = tabulate(collect(rows(values)), "accuracy,seconds")
    by = {row.label: row.entries["", "accuracy"] for row in table.rows}
    assert by["local"].mean == pytest.approx(0.2)
    assert by["local"].std == pytest.approx(0.1)  # of the population
    ranks = {name: entry.rank for name, entry in by.items()}
    assert ranks == {"local": 0, "fedproto": 1, "fedper": 1, "fedrep": 2, "ditto": 0}
    assert all(row.entries["", "seconds"].rank == 0 for row in table.rows)
    assert any("different numbers of seeds (1, 2)" in note for note in table.notes)
    text = render.markdown(table)
    assert "| fedproto | **60.00 ± 10.00** | 3.0 |" in text
    assert "| fedrep | *55.00 ± 0.00* | 3.0 |" in text
    assert "| ditto | 99.00 (n=1) | 3.0 |" in text


def test_of_two_different_numbers_the_second_is_the_worst() -> None:
    table = tabulate(collect(rows({"local": [0.1, 0.1], "fedper": [0.5, 0.5], "ditto": [0.5, 0.5]})), "accuracy")
    assert {row.label: row.entries["", "accuracy"].rank for row in table.rows} == {"local": 0, "fedper": 1, "ditto": 1}


def test_rows_of_different_seeds_are_not_ranked() -> None:
    runs = rows({"local": [0.1, 0.2, None, None], "fedper": [None, None, 0.5, 0.6]})
    table = tabulate(collect(runs), "accuracy")
    assert [row.entries["", "accuracy"].rank for row in table.rows] == [0, 0]
    assert any("rows have different seeds (fedper: 2, 3; local: 0, 1)" in note for note in table.notes)


def line(number: int, accuracy: float, **more: float) -> dict[str, Any]:
    return {"round": number, "accuracy_mean": accuracy, **more}


def test_last_round_last_ten_and_best_on_validation_are_different_columns() -> None:
    curve = [line(r, r / 100, validation_mean=-abs(r - 7), validation_global_mean=-abs(r - 3)) for r in range(1, 21)]
    curve = [row | {"global_accuracy": row["round"] / 200} for row in curve]
    one = read_finished(folder("a", 0.9, rounds=curve))
    assert Column.parse("accuracy").of(one) == 0.9
    assert Column.parse("accuracy@last10").of(one) == pytest.approx(sum(range(11, 21)) / 1000)
    assert Column.parse("accuracy@12").of(one) == pytest.approx(sum(range(3, 13)) / 1000)
    assert Column.parse("accuracy@validation").of(one) == pytest.approx(0.07)
    assert Column.parse("global@validation").of(one) == pytest.approx(0.015)  # by the global model's own validation
    titles = [Column.parse(f"accuracy{at}").title for at in ("", "@last10", "@validation", "@12")]
    assert titles == ["accuracy", "accuracy, last 10", "accuracy, best on validation", "accuracy, rounds 3 to 12"]


def test_means_of_fewer_rounds_than_ten_are_named() -> None:
    thin = [{**line(r, r / 100), "accuracy_mean": r / 100 if r % 4 == 0 else None} for r in range(1, 13)]
    for name, curve in (("local", [line(r, r / 100) for r in range(1, 13)]), ("fedper", thin)):
        folder(f"runs/{name}", 0.5, f"method={name}", rounds=curve)
    table = tabulate(collect("runs"), "accuracy,accuracy@last10")
    entries = {row.label: row.entries["", "accuracy, last 10"] for row in table.rows}
    assert [entries[name].mean for name in ("local", "fedper")] == pytest.approx([0.075, 0.08])
    assert [entry.rank for entry in entries.values()] == [0, 0], "means of different rounds are not ranked"
    said = "accuracy, last 10: means of fewer than 10 tested rounds (3: fedper; 10: local), and not ranked"
    assert any(note.startswith(said) for note in table.notes)
    with pytest.raises(UserError, match="accuracy@13: the runs have 12 rounds"):
        tabulate(collect("runs"), "accuracy@13")


def test_a_round_without_validation_is_not_the_best_on_it() -> None:
    curve = [line(1, 0.1, validation_mean=math.nan), line(2, 0.2, validation_mean=0.5)]
    one = replace(read_finished(folder("a", rounds=curve[1:])), rounds=curve)
    assert Column.parse("accuracy@validation").of(one) == 0.2


def test_other_models_are_other_rows_and_never_other_seeds() -> None:
    folder("runs/a", 0.2, "method=local", "model=cnn_digits", "seed=0")
    folder("runs/b", 0.4, "method=local", "seed=1")  # the demo's three architectures
    table = tabulate(collect("runs"), "accuracy")
    assert [row.label for row in table.rows] == [
        "local, model=cnn_digits",
        "local, model=cnn_digits_8+cnn_digits_16+mlp_digits",
    ]
    runs = [  # of two sweeps, which name no model
        replace(one, labels={"experiment": "demo", "method": "local", "seed": str(one.seed)})
        for one in collect("runs").runs
    ]
    table = tabulate(runs, "accuracy")
    assert [row.entries["demo", "accuracy"].values for row in table.rows] == [{0: 0.2}]
    assert any("other settings" in note and "model.name" in note for note in table.notes)


def test_runs_of_changed_code_are_named() -> None:
    for seed, code in enumerate(("aa", "bb")):
        here = RunFolder(folder(f"runs/{seed}", 0.2, "method=local", f"seed={seed}"))
        here.write_json("environment.json", {"protofed": VERSION, "own": {"mine:Net": code}})
    assert any("local: its code was changed between its runs" in n for n in tabulate(collect("runs")).notes)
    RunFolder(Path("runs/1")).write_json("environment.json", {"protofed": VERSION})  # when it was not kept yet
    assert not any("code was changed" in n for n in tabulate(collect("runs")).notes)


def test_keys_of_two_sections_are_told_apart() -> None:
    folder("runs/a", 0.2, "method=local")
    one = collect("runs").runs[0]
    one.labels.update({"join.steps": "5", "method.steps": "10", "optimizer.lr": "0.1", "model.name": "net"})
    assert tabulate([one]).rows[0].label == "local, join.steps=5, method.steps=10, lr=0.1, model=net"


def test_the_best_on_the_test_set_cannot_be_had() -> None:
    folder("runs/a", rounds=[line(1, 0.9), line(2, 0.5)])
    with pytest.raises(UserError, match="best round on the test set is not offered"):
        tabulate(collect("runs"), "accuracy@best")
    with pytest.raises(UserError, match=r"evaluate\.validation"):
        tabulate(collect("runs"), "accuracy@validation")
    with pytest.raises(UserError, match=r"no run has a number for column 'global model'\. The runs have accuracy, "):
        tabulate(collect("runs"), "global")
    with pytest.raises(UserError, match="rounds are counted from 1"):
        tabulate(collect("runs"), "accuracy@0")
    folder("held/a", rounds=[line(1, 0.9) | {"validation_mean": 0.4}])
    with pytest.raises(UserError, match=r"'PM\(V\)' is not measured in those rounds.*--columns pm_v\."):
        tabulate(collect("held"), "pm_v@validation")
    with pytest.raises(UserError, match="after @ write last10"):
        tabulate(collect("runs"), "accuracy@last5")
    with pytest.raises(UserError, match="Did you mean 'accuracy'"):
        tabulate(collect("runs"), "acuracy")


def test_runs_without_a_sweep_are_told_apart_by_what_differs() -> None:
    for seed in (0, 1):
        folder(f"runs/a{seed}", 0.1, "method.lam=1.0", f"seed={seed}")
        folder(f"runs/b{seed}", 0.2, "method.lam=4.0", f"seed={seed}")
        folder(f"runs/c{seed}", 0.3, "method=local", f"seed={seed}")
    folder("runs/d0", 0.4, "method=local", "partition.shots=2", partition="q")
    table = tabulate(collect("runs"), "accuracy", "local")
    assert [row.label for row in table.rows] == ["fedproto, lam=1.0", "fedproto, lam=4.0", "local"]
    assert table.settings == ["shots=3", "shots=2"]  # another task: a column, not a row
    assert render.caption(tabulate(collect("runs"), "worst10")).startswith("worst tenth: %, mean")
    assert render.caption(tabulate(collect("runs"), "seconds")).startswith("seconds: mean")
    assert table.rows[0].entries[table.settings[0], "accuracy"].test.difference == pytest.approx(-0.2)  # type: ignore[union-attr]
    assert not any("cannot be compared" in note for note in table.notes)


@pytest.mark.parametrize(
    ("change", "other"),
    [("selection.rule=size", "rule=random"), ("robust.rule=median", "rule=none"), ("optimizer.warmup=1", "warmup=0")],
)
def test_runs_that_differ_in_a_key_that_files_leave_out_are_two_rows(change: str, other: str) -> None:
    folder("runs/plain", 0.1)
    folder("runs/changed", 0.2, change)
    table = tabulate(collect("runs"), "accuracy")
    assert {row.label for row in table.rows} == {f"fedproto, {change.partition('.')[2]}", f"fedproto, {other}"}
    assert not table.left_out


@pytest.mark.parametrize(
    "change", ["skew.labels=[0.5]", "data.imbalance=10", "stragglers.share=0.5", "incremental.tasks=2"]
)
def test_runs_on_other_samples_are_other_columns(change: str) -> None:
    folder("runs/plain", 0.1)
    folder("runs/changed", 0.2, change)
    table = tabulate(collect("runs"), "accuracy")
    assert (len(table.rows), len(table.settings), table.left_out) == (1, 2, [])


def test_a_baseline_is_met_with_the_same_parameters() -> None:
    for rate in (0.1, 0.2):
        folder(f"runs/a{rate}", rate, f"optimizer.lr={rate}")
        folder(f"runs/b{rate}", rate + 0.05, "method=local", f"optimizer.lr={rate}")
    table = tabulate(collect("runs"), "accuracy", "local")
    gains = {row.label: row.entries["", "accuracy"].test for row in table.rows}
    assert gains["fedproto, lr=0.2"].difference == pytest.approx(-0.05)  # type: ignore[union-attr]
    assert gains["fedproto, lr=0.1"].difference == pytest.approx(-0.05)  # type: ignore[union-attr]
    named = tabulate(collect("runs"), "accuracy", "local, lr=0.2")
    gains = {row.label: row.entries["", "accuracy"].test for row in named.rows}
    assert gains["fedproto, lr=0.1"].difference == pytest.approx(-0.15)  # type: ignore[union-attr]
    with pytest.raises(UserError, match="--baseline 'fedavg' is not a row"):
        tabulate(collect("runs"), "accuracy", "fedavg")


# what is left out, and what cannot be compared


def test_whatever_is_no_finished_run_is_named_and_left_out() -> None:
    folder("runs/good", 0.5)
    (folder("runs/unfinished", rounds=[line(1, 0.1), line(2, 0.2)]) / "summary.json").unlink()
    (folder("runs/nan", rounds=[line(1, 0.1)]) / "summary.json").unlink()
    Path("runs/nan.failed.txt").write_text("the loss is not a number\nand more\n")
    Path("runs/good.failed.txt").touch()
    (folder("runs/damaged") / "summary.json").write_text("{")
    (folder("runs/torn", rounds=[line(1, 0.1)]) / "rounds.jsonl").write_text("{]\n")
    (folder("runs/headless") / "experiment.toml").unlink()
    RunFolder(folder("runs/old")).write_json("summary.json", {"accuracy": 0.9})
    RunFolder(folder("runs/mixed")).write_json(
        "summary.json", {**RunFolder(Path("runs/good")).summary(), "method": "local"}
    )
    RunFolder(folder("runs/earlier", 0.9)).write_json("environment.json", {"protofed": "0.0.1"})
    folder("runs/twice", 0.7)
    found = collect("runs")
    reasons = {out.folder.name: out.reason for out in found.left_out}
    assert [one.folder.name for one in found.runs] == ["good", "twice"]
    assert "unfinished: 2 of 60 rounds" in reasons["unfinished"]
    assert reasons["nan"] == "failed after 1 of 60 rounds: the loss is not a number"
    assert "damaged" in reasons["damaged"]
    assert "damaged" in reasons["torn"]
    assert "half written" in reasons["headless"]
    assert "another version" in reasons["old"]
    assert "different methods" in reasons["mixed"]
    assert "made by protofed 0.0.1" in reasons["earlier"]
    table = tabulate(found, "accuracy")
    assert table.rows[0].entries["", "accuracy"].values == {0: 0.5}
    assert any("runs/twice: a second run of fedproto, seed 0" in note for note in table.notes)
    assert sum(note.startswith("left out: ") for note in table.notes) == 9
    assert [one.folder.name for one in collect("runs", any_version=True).runs] == ["earlier", "good", "twice"]
    with pytest.raises(UserError, match=r"no finished run.*unfinished"):
        tabulate(collect("runs/unfinished"))
    with pytest.raises(UserError, match="there is no folder 'nowhere'"):
        collect("nowhere")


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("summary.json", '{"seed": null}', "seed is None"),
        ("summary.json", '{"accuracy_mean": "high"}', "accuracy_mean is 'high', which is not a number"),
        ("rounds.jsonl", "null\n", "is damaged"),
        ("rounds.jsonl", '{"loss": 1}\n', "a line is not a round"),
        ("rounds.jsonl", '{"round": 59}\n{"round": 60', "its rounds.jsonl ends at round 59 of 60"),
        ("rounds.jsonl", "", "its rounds.jsonl ends at round 0 of 60"),
        ("experiment.toml", b"\xff", "cannot be read"),
        ("summary.json", "[1]", "is damaged"),
        ("summary.json", '{"accuracy_mean": NaN}', "NaN is not a number"),
    ],
)
def test_one_damaged_run_ends_no_table(file: str, content: str | bytes, why: str) -> None:
    runs = rows({"local": [0.5], "fedproto": [0.6]})
    bad = runs / "fedproto-0" / file
    if file == "summary.json" and content != "[1]":
        content = json.dumps(json.loads(bad.read_text()) | json.loads(content))
    bad.write_bytes(content if isinstance(content, bytes) else content.encode())
    table = tabulate(collect(runs))
    assert [row.label for row in table.rows] == ["local"]
    assert why in table.notes[-1]


def test_an_empty_partition_and_a_short_method_are_read() -> None:
    runs = rows({"local": [0.5], "fedproto": [0.6]})
    (runs / "local-0" / "partition.npz").write_bytes(b"")
    toml = runs / "fedproto-0" / "experiment.toml"
    toml.write_text('method = "fedproto"\n')
    assert [row.label for row in tabulate(collect(runs)).rows] == ["fedproto", "local"]


def test_sweeps_of_other_settings_are_not_averaged() -> None:
    for name, rounds, seeds in (("a", 1, (0, 1)), ("b", 8, (2, 3))):
        cells = []
        for seed in seeds:
            folder(f"mix/{name}/{seed}", 0.1 * rounds, "method=local", f"rounds={rounds}", f"seed={seed}")
            labels = {"experiment": "demo", "method": "local", "seed": str(seed)}
            cells.append({"folder": str(seed), "hash": "", "labels": labels})
        Path(f"mix/{name}/cells.json").write_text(json.dumps(cells))
    table = tabulate(collect("mix"), "accuracy")
    assert table.rows[0].entries["demo", "accuracy"].values == {0: 0.1, 1: 0.1}
    assert [note for note in table.notes if "left out" in note] == [
        f"left out: mix/b/{seed}: other settings than mix/a/0: rounds 1 -> 8" for seed in (2, 3)
    ]


def test_what_is_no_number_is_not_ranked_and_what_reads_alike_is_marked_alike() -> None:
    runs = rows({"local": [0.2628], "fedproto": [0.5], "fedavg": [0.2934]})
    summary = runs / "fedproto-0" / "summary.json"
    summary.write_text(summary.read_text().replace("0.5", "NaN", 1))
    known = [row for row in tabulate(collect(runs), "accuracy").rows if row.entries]
    assert {row.label: row.entries["", "accuracy"].rank for row in known} == {"fedavg": 1, "local": 0}
    runs = rows({"local": [0.39375], "fedproto": [0.3937], "fedavg": [0.3938]}, "ties")
    table = tabulate(collect(runs), "accuracy")
    marked = {f"{100 * row.entries['', 'accuracy'].mean:.2f}": row.entries["", "accuracy"].rank for row in table.rows}
    shown = [f"{100 * row.entries['', 'accuracy'].mean:.2f}" for row in table.rows]
    assert all(marked[text] == row.entries["", "accuracy"].rank for text, row in zip(shown, table.rows, strict=True))
    assert Column.parse("held_out_steps").metric.unit == ""


def test_a_baseline_of_several_rows_is_refused() -> None:
    for lam in (1, 4):
        folder(f"runs/{lam}", 0.5, "method=fedproto", f"method.lam={lam}")
    folder("runs/local", 0.4, "method=local")
    with pytest.raises(UserError, match=r"is several rows\. Name one of 'fedproto, lam=1.0', 'fedproto, lam=4.0'"):
        tabulate(collect("runs"), baseline="fedproto")


def test_a_sweep_names_finished_cells_that_are_not_in_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    runs = rows({"local": [0.5, 0.5], "fedproto": [0.6, 0.6]})
    old = runs / "fedproto-1"
    (old / "environment.json").write_text('{"protofed": "0.0.9"}')
    table_of(collect(runs), [old])
    assert f"left out: {old}: made by protofed 0.0.9" in " ".join(capsys.readouterr().out.split())
    table_of(collect(runs))
    assert "left out" not in capsys.readouterr().out


def test_only_the_cells_of_a_sweep_are_shown_unless_all_are_asked_for() -> None:
    labels = {"experiment": "demo", "method": "mine", "seed": "0"}
    folder("runs/one-abc", 0.5)
    folder("runs/dropped-def", 0.6)
    listing = [
        {"folder": "one-abc", "hash": "abc", "labels": labels},
        {"folder": "gone-ghi", "hash": "ghi", "labels": labels},
    ]
    Path("runs/cells.json").write_text(json.dumps(listing))
    found = collect("runs")
    assert [one.labels["method"] for one in found.runs] == ["mine"]
    assert {out.folder.name: out.reason for out in found.left_out} == {
        "gone-ghi": "not run yet", "dropped-def": "not a cell of sweep.toml (--all takes it)",
    }  # fmt: skip
    assert len(collect("runs", everything=True).runs) == 2


def test_a_run_beside_a_sweep_is_told_by_what_differs_from_it() -> None:
    folder("runs/one-abc", 0.5, "method=fedproto", "method.lam=1")
    folder("runs/strong-def", 0.6, "method=fedproto", "method.lam=4")
    labels = {"experiment": "demo", "method": "fedproto", "seed": "0"}
    Path("runs/cells.json").write_text(json.dumps([{"folder": "one-abc", "hash": "abc", "labels": labels}]))
    made = tabulate(collect("runs", everything=True))
    assert [row.label for row in made.rows] == ["fedproto", "fedproto, lam=4.0"]
    Path("runs/cells.json").write_text(json.dumps([{"folder": "one-abc", "labels": {"seed": "0"}}]))
    with pytest.raises(UserError, match=r"cells\.json is damaged"):
        collect("runs")


def test_long_labels_are_shortened_to_what_differs() -> None:
    long = "cnn_digits_8+cnn_digits_16+mlp_digits"
    rows_ = [("local", {"model.name": long, "optimizer.lr": rate, "rounds": "5"}) for rate in ("0.1", "0.2")]
    rows_.append(("fedavg", {"model.name": "cnn_digits", "optimizer.lr": "0.1", "rounds": "5"}))
    assert short_labels(rows_) == ["local, lr=0.1", "local, lr=0.2", "fedavg"]
    assert short_labels(rows_, 100)[0] == f"local, model={long}, lr=0.1, rounds=5"
    values = [f"{'a long name of a data set, ' * 3}part {i}" for i in range(2)]
    cut = short_labels([("local", {"data.name": value}) for value in values])
    assert len(set(cut)) == 2
    assert max(map(len, cut)) < 40
    changes = ("model=cnn_digits", "optimizer.weight_decay=0.0001234567", "rounds=7")
    folder("runs/a", 0.5, "method=local", *changes)
    folder("runs/b", 0.6, "method=fedavg", "rounds=8")
    table = tabulate(collect("runs"), "accuracy", "fedavg")
    assert [row.label for row in table.rows] == ["local", "fedavg"]
    (note,) = (note for note in table.notes if note.startswith("labels are shortened"))
    assert "'local' is 'local, " in note
    assert "weight_decay=0.0001234567" in note


def test_columns_of_fewer_seeds_are_said_to_be_so() -> None:
    for seed in (0, 1):
        folder(f"runs/a{seed}", 0.5, "method=local", f"seed={seed}")
    folder("runs/b", 0.5, "method=local", "clients=7")
    notes = tabulate(collect("runs")).notes
    assert any("columns have different numbers of seeds (1, 2)" in note for note in notes)
    assert not any("not ranked" in note for note in notes)


def test_held_out_clients_make_another_column() -> None:
    for held in (0, 1):
        folder(f"runs/{held}", 0.5 + held / 10, "method=local", "clients=4", f"held_out_clients={held}")
    made = tabulate(collect("runs"))
    assert len(made.rows) == 1
    assert len(made.settings) == 2


def test_a_table_says_when_ones_own_code_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(".")
    name = "mymethods_of_a_table:Mine"
    Path("mymethods_of_a_table.py").write_text(
        'from protofed.methods import METHODS\nclass Mine(METHODS["local"]):\n    pass\n'
    )
    here = RunFolder(folder("runs/mine", 0.5, f"method={name}"))
    now = own_code(Experiment.load("demo", f"method={name}"))
    for code, said in ((now, False), (dict.fromkeys(now, "another"), True)):
        here.write_json("environment.json", {"protofed": VERSION, "own": code})
        notes = tabulate(collect("runs")).notes
        assert any("has changed since its runs" in note for note in notes) == said


def test_rows_of_another_partition_are_neither_ranked_nor_tested() -> None:
    for seed in (0, 1):
        folder(f"runs/a{seed}", 0.5, "method=local", f"seed={seed}")
        folder(f"runs/b{seed}", 0.6 + 0.1 * seed, f"seed={seed}")
        folder(f"runs/c{seed}", 0.9, "method=fedper", f"seed={seed}", partition="other" if seed else "p")
    table = tabulate(collect("runs"), "accuracy", "local")
    by = {row.label: row.entries["", "accuracy"] for row in table.rows}
    assert (by["fedproto"].rank, by["fedper"].rank) == (1, 0)
    assert by["fedper"].test is not None
    assert by["fedper"].test.n == 1  # seed 0 was dealt alike
    (note,) = (note for note in table.notes if "cannot be compared" in note)
    assert "fedper" in note
    assert "seeds 1," in note
    assert "≠" in render.markdown(table)


# formats


def test_rows_of_other_seeds_are_named() -> None:
    folder("runs/a", 0.5, "method=local", "seed=0")
    folder("runs/b", 0.6, "method=fedavg", "seed=7")
    assert any("rows have different seeds (local: 0; fedavg: 7)" in n for n in tabulate(collect(["runs"])).notes)


def judged(path: str, method: str, seed: int, rule: tuple[str, str], main: float, **by: float | None) -> None:
    """A run whose method judges by this rule, with what it stores by others."""
    here = RunFolder(folder(path, main, f"method={method}", f"seed={seed}"))
    how = dict(zip(("inference", "candidates"), rule, strict=True))
    here.write_json("summary.json", here.summary() | how | by)


def unlike_things() -> Path:
    """FedProto by nearest prototype among own classes beside two methods by classifier among all."""
    for seed, more in enumerate((0.0, 0.01)):
        for method, main in (("fedavg", 0.84), ("local", 0.87)):
            judged(f"runs/{method}{seed}", method, seed, ("head", "all"), main + more, accuracy_head_mean=main + more)
        by = {"accuracy_head_mean": 0.88 + more, "accuracy_proto_mean": 0.72 + more}
        judged(f"runs/fedproto{seed}", "fedproto", seed, ("proto", "own"), 0.72 + more, **by)
    return Path("runs")


def ranks(table: Table, title: str) -> dict[str, int]:
    return {row.label: row.entries["", title].rank for row in table.rows if ("", title) in row.entries}


@pytest.mark.parametrize("columns", [None, "accuracy,worst10", "accuracy,head,proto,worst10"])
def test_numbers_of_different_judging_rules_are_different_columns(columns: str | None) -> None:
    table = tabulate(collect(unlike_things()), columns, "local")
    by_classifier, by_prototype = "classifier, all classes", "nearest prototype, own classes"
    titles = [column.title for column in table.columns]
    assert {by_classifier, by_prototype} <= set(titles)
    assert "accuracy" not in titles
    assert ranks(table, by_classifier) == {"fedavg": 0, "fedproto": 1, "local": 2}
    assert ranks(table, by_prototype) == {"fedproto": 0}, "nobody is best alone"
    assert ranks(table, f"worst tenth, {by_classifier}") == {"fedavg": 0, "local": 1}
    fedproto = next(row for row in table.rows if row.label == "fedproto")
    assert fedproto.entries["", by_classifier].test.difference == pytest.approx(0.01)  # type: ignore[union-attr]
    assert fedproto.entries["", by_prototype].test is None
    assert fedproto.entries["", f"worst tenth, {by_prototype}"].test is None
    text = render.markdown(table)
    assert "| fedproto | **88.50 ± 0.50** |" in text
    assert "72.50 ± 0.50† |" in text, "the rule of the method is marked"
    assert "*87.50 ± 0.50†*" in text
    assert "† the rule of the method itself (classifier, all classes: fedavg, local; nearest" in text
    found = list(csv.DictReader(io.StringIO(render.as_csv(table))))
    assert {(row["row"], row["own_rule"]) for row in found if row["column"] == by_classifier} == {
        ("fedavg", "True"), ("local", "True"), ("fedproto", "False"),
    }  # fmt: skip
    together = {row["column"]: {one["judged_by"] for one in found if one["column"] == row["column"]} for row in found}
    assert all(len(rules) == 1 for rules in together.values())
    tex = render.latex(table)
    caption = next(line for line in tex.splitlines() if line.startswith(r"\caption"))
    assert r"$^\dagger$ the rule of the method itself (classifier, all classes: fedavg, local; nearest prot" in caption
    assert r"\label{tab:results}" in tex
    assert tex.index(r"\begin{table}") < tex.index(r"\caption") < tex.index(r"\begin{tabular}")


def test_rows_that_judge_alike_share_a_column_and_the_caption_says_by_what() -> None:
    for method in ("local", "fedavg"):
        judged(f"runs/{method}", method, 0, ("head", "own"), 0.5, accuracy_head_mean=0.4, accuracy_head_own_mean=0.5)
    table = tabulate(collect("runs"), "accuracy")
    assert [column.title for column in table.columns] == ["accuracy"]
    assert render.caption(table).endswith("; judged by classifier, own classes")
    usual = [column.title for column in tabulate(collect("runs")).columns]
    assert usual[:3] == ["classifier, all classes", "classifier, own classes", "worst tenth"]
    assert [Column.parse(f"head{at}").title for at in ("", "-own")] == usual[:2]


def test_rounds_and_the_global_model_are_by_rule_too() -> None:
    curve = [line(r, r / 100, accuracy_head_mean=r / 50, global_accuracy=0.5, global_accuracy_head=0.6) for r in (1, 2)]
    one = read_finished(folder("a", rounds=curve))
    one.summary.update(inference="proto", candidates="own")  # type: ignore[union-attr]
    other = read_finished(folder("b", rounds=[line(r, 0.3) for r in (1, 2)]))
    own, head = Column.parse("accuracy@last10"), Column.parse("head@last10")
    assert [column.title for column in by_rule(own, [one, other])] == [
        "classifier, all classes, last 10", "nearest prototype, own classes, last 10",
    ]  # fmt: skip
    assert head.of(one) == pytest.approx(0.03)
    assert head.of(other) == pytest.approx(0.3), "what a run stores as its accuracy is that of its rule"
    assert by_rule(own, [one, other])[1].of(one) == pytest.approx(0.015)
    assert by_rule(own, [one, other])[1].of(other) is None
    by_head, by_proto = by_rule(Column.parse("global@last10"), [one, other])
    assert (by_head.of(one), by_proto.of(one), by_proto.of(other)) == (0.6, 0.5, None)


def test_latex_is_escaped_and_has_rules() -> None:
    folder("runs/a", 0.5, "method=fedproto")
    folder("runs/b", 0.4, "method=local")
    folder("runs/c", 0.3, "method=fedper")
    one = collect("runs")
    one.runs[0].labels["method"] = "50% & more_{x}"
    text = render.latex(tabulate(one, "accuracy"))
    assert r"50\% \& more\_\{x\} & \textbf{50.00} \\" in text
    assert r"\underline{40.00}" in text
    one.runs[0].labels["method"] = "*λ > |x|"
    one.runs[1].summary["gain"] = -3e-7
    text = render.latex(tabulate(one, "gain,accuracy"))
    assert r"{}*$\lambda$ $>$ \textbar{}x\textbar{} & - & \textbf{50.00} \\" in text, "no row begins with a star"
    assert "local & $-$3e$-$07 & " in text, "escaped once"
    assert r"| \*λ > \|x\| | - | **50.00** |" in render.markdown(tabulate(one, "gain,accuracy"))
    for part in (r"\begin{tabular}{lrr}", r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}"):
        assert part in text


def test_csv_has_every_seed_unrounded() -> None:
    table = tabulate(collect(rows({"local": [0.123456789, 0.2], "fedproto": [0.3, 0.5]})), "accuracy", "local")
    found = list(csv.DictReader(io.StringIO(render.as_csv(table))))
    assert [(row["row"], row["seed 0"]) for row in found] == [("fedproto", "0.3"), ("local", "0.123456789")]
    assert float(found[0]["difference"]) == pytest.approx((0.3 - 0.123456789 + 0.3) / 2)
    assert found[1]["difference"] == ""
    folder("one/a", 0.5, "method=local", "optimizer.lr=0.1")
    folder("one/b", 0.6, "method=fedproto", "optimizer.lr=0.1")
    folder("one/c", 0.7, "method=fedproto", "optimizer.lr=0.2")
    found = list(csv.DictReader(io.StringIO(render.as_csv(tabulate(collect("one"), "accuracy", "local, lr=0.1")))))
    assert {row["std"] for row in found} == {""}, "one seed has no deviation"
    assert {row["baseline"] for row in found} == {"", "local, lr=0.1"}


def test_a_narrow_screen_breaks_no_number() -> None:
    made = tabulate(collect(rows({"local": [0.12, 0.2], "fedproto": [0.3, 0.5]})), "accuracy,worst10,std,seconds")
    made.rows[0].short = "fedproto, note=a label that is far longer than a screen of forty letters can show"
    for width in (40, 80, 200):
        console = Console(width=width, file=io.StringIO(), record=True)
        console.print(render.terminal(made, width))
        text = console.export_text()
        assert max(map(len, text.splitlines())) <= width
        for part in ("16.00±4.00", "40.00±10.00¹", "20.00±5.00¹", "10.00±0.00", "worst", "seconds"):
            assert part in text
        assert text.count("method") == {40: 4, 80: 2, 200: 1}[width], "what does not fit goes on below"


def test_a_folder_is_no_file_for_a_table() -> None:
    folder("runs/a")
    Path("here").mkdir()
    said = protofed("table", "runs", "--out", "here", "--format", "csv")
    assert said.returncode == 2
    assert "--out here is a folder" in said.stderr
    with pytest.raises(OSError, match="here"):
        write_atomically(Path("here"), b"")
    assert not list(Path().glob(".*.partial"))


def test_the_command_on_real_runs() -> None:
    for method in ("local", "fedproto"):
        plan = Experiment.load(
            "demo", f"method={method}", "rounds=2", "clients=4", "model=mlp_digits", "partition.shots=4"
        )
        run(plan, f"runs/{method}")

    def table(*words: str) -> "subprocess.CompletedProcess[str]":
        return protofed("table", "runs", *words)

    columns = "accuracy,accuracy@last10,worst10"
    done = table("--columns", columns, "--baseline", "local", "--out", "tables/t.tex")
    assert done.returncode == 0, done.stderr
    assert "table: tables/t.tex" in done.stdout
    assert "note: Δ: mean difference to local" in done.stderr
    assert r"\toprule" in Path("tables/t.tex").read_text()
    shown = table("--columns", columns, "--format", "csv")
    found = list(csv.DictReader(io.StringIO(shown.stdout)))
    means = [json.loads(Path(f"runs/{m}/summary.json").read_text())["accuracy_mean"] for m in ("fedproto", "local")]
    assert [float(row["mean"]) for row in found[:2]] == means
    last = [json.loads(row) for row in Path("runs/local/rounds.jsonl").read_text().splitlines()]
    assert float(found[3]["mean"]) == pytest.approx(sum(row["accuracy_mean"] for row in last) / 2)


def test_a_table_says_what_papers_letters_mean() -> None:
    here = RunFolder(folder("runs/a", 0.5, "method=fedavg"))
    here.write_json("summary.json", here.summary() | {"pm_v": 0.4, "pm_l": 0.3, "global_accuracy": 0.2})
    made = tabulate(collect("runs"), "accuracy,pm_v,pm_l,global")
    for text in (render.markdown(made), render.latex(made), render.caption(made)):
        assert "PM(V): the clients' own models on the whole test set, over the classes that each client holds" in text
        assert "PM(L): the clients' own models on the whole test set, each class weighted by its share" in text
        assert "global model: the global model on the whole test set (GM in papers)" in text
    assert "PM(" not in render.caption(tabulate(collect("runs"), "accuracy"))
