"""The report: what is read, what is left out and said, and that its numbers are right."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import protofed
from rich.console import Console
from written import views, write_run

from protofed.cli import printing
from protofed.cli.report import write_report
from protofed.errors import UserError
from protofed.report import html, marks, paper
from protofed.report.figure import told_apart
from protofed.report.figures import clients, confusion, embeddings, partition, projection, similarity, time, traffic
from protofed.report.figures.accuracy import curve
from protofed.report.gather import gather
from protofed.report.groups import group, incomparable
from protofed.report.live import Live
from protofed.runs.measure import Result


def report(*words: str) -> "subprocess.CompletedProcess[str]":
    return protofed("report", *words)


def shown(*paths: Path) -> dict[str, Any]:
    found = html.data(gather(paths))
    json.dumps(found, allow_nan=False)
    return found


def figure(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(some for some in data["figures"] if some["id"] == name)


def test_what_cannot_be_read_is_named_and_the_rest_is_drawn(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "good")
    write_run(tmp_path / "runs" / "half", seed=1)
    (tmp_path / "runs" / "half" / "experiment.toml").unlink()
    write_run(tmp_path / "runs" / "newer", seed=2)
    plan = tmp_path / "runs" / "newer" / "experiment.toml"
    plan.write_text("shoe_size = 46\n" + plan.read_text())
    write_run(tmp_path / "runs" / "other", seed=3)
    plan = tmp_path / "runs" / "other" / "experiment.toml"
    plan.write_text(plan.read_text().replace('"fedproto"', '"fedwhatever"'))
    write_run(tmp_path / "runs" / "torn", seed=4)
    (tmp_path / "runs" / "torn" / "rounds.jsonl").write_text('{"round": 1, "acc\n{"round": 2}\n')
    write_run(tmp_path / "runs" / "begun", seed=5, finished=False)
    (tmp_path / "runs" / "begun" / "rounds.jsonl").write_text("")
    write_run(tmp_path / "runs" / "early")  # the settings of "good": it is not to stand in its place
    (tmp_path / "runs" / "early" / "environment.json").write_text('{"protofed": "0.0.9"}')
    done = report(str(tmp_path / "runs"), str(tmp_path / "nowhere"), "--out", "page.html")
    assert done.returncode == 0, done.stderr
    for name in ("half", "newer", "other", "torn", "begun", "nowhere", "early"):
        assert sum(f"{name}:" in line for line in done.stderr.splitlines()) == 1, done.stderr
    assert "shoe_size" in done.stderr
    assert "fedwhatever" in done.stderr
    assert "made by protofed 0.0.9, not 0.1.0" in done.stderr
    assert "page.html (runs: 1)" in done.stdout
    data = json.loads(Path("page.html").read_text().split('id="data">')[1].split("</script>")[0])
    assert len(data["left_out"]) == 7
    assert [method["label"] for method in data["methods"]] == ["fedproto"]


CLIENT = b'{"client": 0, "architecture": "a", "train": 1, "accuracy": %s, "classes": %s}\n'


@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")  # of files that other tests left open
@pytest.mark.parametrize(
    ("file", "damage", "why"),
    [
        ("rounds.jsonl", b"\xff\xfe\n", "is damaged"),
        ("rounds.jsonl", b"[]\n", "is damaged"),
        ("rounds.jsonl", b'{"round": 99, "seconds": "long"}\n', "seconds is 'long', which is not a number"),
        ("rounds.jsonl", b'{"round": 99, "loss": "high"}\n', "lines that are not rounds"),
        ("rounds.jsonl", b'{"round": 99, "loss": 1, "theory": "yes"}\n', "lines that are not rounds"),
        ("rounds.jsonl", b'{"round": 99, "loss": 1, "parts": [1]}\n', "lines that are not rounds"),
        ("rounds.jsonl", b'{"round": 99, "loss": Infinity, "seconds": NaN, "parts": {"a": NaN}}\n', "NaN or Infinity"),
        ("rounds.jsonl", b'{"round": 99, "loss": 1, "margin": "wide"}\n', "margin is 'wide', which is not a number"),
        ("rounds.jsonl", b'{"round": 99, "loss": 1, "accuracy_worst10": [1]}\n', "which is not a number"),
        ("rounds.jsonl", b'{"round": 99, "loss": 1, "bytes_up_by": {"weights": "x"}}\n', "which is not a number"),
        ("rounds.jsonl", b'{"round": 99, "loss": 1, "parts": {"train": null}}\n', "lines that are not rounds"),
        ("experiment.toml", b"\xff", "another version"),
        ("summary.json", b"[]", "is damaged"),
        ("summary.json", b'{"accuracy_mean": "high"}', "accuracy_mean is 'high', which is not a number"),
        ("summary.json", b'{"method": "local"}', "is damaged: seed is None"),
        ("clients.jsonl", b"7\n", "clients.jsonl cannot be read"),
        ("clients.jsonl", b'{"client": 0}\n', "clients.jsonl cannot be read"),
        ("clients.jsonl", b'{"client": 0, "accuracy": "x"}\n', "accuracy is 'x', which is not a number"),
        ("clients.jsonl", CLIENT % (b"NaN", b"[0]"), "clients.jsonl has NaN or Infinity"),
        ("clients.jsonl", CLIENT % (b"0.5", b"null"), "clients.jsonl cannot be read"),
        ("clients.jsonl", CLIENT % (b"0.5", b"[0]"), "clients: it was cut, and is left out"),
        ("clients.jsonl", b"", "clients.jsonl cannot be read (it is empty)"),
        ("classes.json", b'{"names": ["one"]}', "1 names for"),
        ("classes.json", b'{"names": 7}', "classes.json cannot be read"),
        ("classes.json", b'{"superclasses": ["a", null]}', "classes.json cannot be read"),
        ("partition.npz", b"", "partition.npz cannot be read"),
    ],
)
def test_no_damage_ends_a_report(tmp_path: Path, file: str, damage: bytes, why: str) -> None:
    write_run(tmp_path / "good", "local")
    path = write_run(tmp_path / "bad") / file
    path.write_bytes(path.read_bytes() + damage if file == "rounds.jsonl" else damage)
    data = shown(tmp_path)
    assert any(why in reason for _, reason in [*data["left_out"], *data["remarks"]])
    assert "local" in [method["label"] for method in data["methods"]]


def test_a_finished_run_stands_in_the_place_of_one_that_was_killed(tmp_path: Path) -> None:
    write_run(tmp_path / "demo", finished=False)
    write_run(tmp_path / "demo-2")
    found = gather([tmp_path])
    assert [run.folder.name for run in found.runs] == ["demo-2"]
    assert [Path(left.folder).name for left in found.left_out] == ["demo"]
    (tmp_path / "demo-2" / "rounds.jsonl").write_text(
        "".join((tmp_path / "demo-2" / "rounds.jsonl").read_text().splitlines(keepends=True)[:3])
    )
    assert "rounds.jsonl ends at round 3 of 12" in shown(tmp_path / "demo-2")["remarks"][0][1]


def test_no_readable_run_is_one_line_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="there is no run that can be read"):
        write_report(gather([tmp_path / "empty"]), Path("page.html"))
    assert not Path("page.html").exists()


def test_a_damaged_part_costs_its_figure_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "views.npz").write_bytes(b"no zip")
    some = views(True, 12, 6, np.random.default_rng(0))
    other = write_run(tmp_path / "other", seed=1)
    np.savez(other / "views.npz", **{**some, "labels": some["labels"][:5]})  # does not fit the rest
    data = shown(tmp_path)
    assert len(data["methods"]) == 1
    assert ["views.npz" in reason for _, reason in data["remarks"]] == [True, True]
    assert figure(data, "embeddings")["missing"]
    assert not figure(data, "confusion")["missing"]


@pytest.mark.parametrize(
    "change",
    [
        {"labels": lambda labels: labels - 1},  # which would be shown as the last class
        {"labels": lambda labels: labels.astype(float)},
        {"rounds": lambda rounds: rounds.astype(str)},
        {"global_held": lambda held: held.astype(float)},
        {"global_class": lambda classes: classes + 100},
    ],
)
def test_views_of_other_types_or_classes_are_left_out(tmp_path: Path, change: dict[str, Any]) -> None:
    some = views(True, 12, 6, np.random.default_rng(0))
    run = write_run(tmp_path / "run")
    np.savez(run / "views.npz", **{**some, **{key: make(some[key]) for key, make in change.items()}})
    data = shown(tmp_path)
    assert "views.npz cannot be read" in data["remarks"][0][1]
    assert figure(data, "embeddings")["missing"]


def test_methods_are_compared_over_the_seeds_that_are_finished(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / f"local-{seed}", "local", seed=seed)
        write_run(tmp_path / f"fedproto-{seed}", seed=seed, finished=seed == 0)
    data = shown(tmp_path)
    assert any("Different finished seeds: fedproto 0; local 0, 1." in line for line in data["incomparable"])
    assert not data["headline"]


def test_what_runs_of_one_method_differ_in_is_said(tmp_path: Path) -> None:
    one, other = (write_run(tmp_path / name) for name in ("one", "other"))
    plan = other / "experiment.toml"
    plan.write_text(re.sub(r"lam = [0-9.]+", "lam = 7.5", plan.read_text()))
    assert [row for row in shown(one, other)["settings"]["differ"] if row[0] == "method.lam"]


def test_seconds_only_grow_where_a_slow_seed_ends_early(tmp_path: Path) -> None:
    write_run(tmp_path / "quick")
    slow = write_run(tmp_path / "slow", seed=1, finished=False) / "rounds.jsonl"
    lines = [json.loads(line) for line in slow.read_text().splitlines()][:3]
    slow.write_text("".join(json.dumps({**line, "seconds": 50.0}) + "\n" for line in lines))
    (some,) = group(gather([tmp_path]).runs)
    line = curve(some, "loss", against="seconds")
    assert line is not None
    assert list(line.x) == sorted(line.x)


def test_names_with_dollars_are_no_formulas(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    names = json.loads((run / "classes.json").read_text())
    names["names"] = ["$\\frac$", *names["names"][1:]]
    (run / "classes.json").write_text(json.dumps(names))
    write_report(gather([run]), tmp_path / "page.html", tmp_path / "figures")
    assert "frac" in (tmp_path / "figures" / "partition.svg").read_text()


def test_long_names_of_classes_are_told_apart(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    names = json.loads((run / "classes.json").read_text())
    names["names"] = [f"{'x' * 40}{i}" for i, _ in enumerate(names["names"])]
    (run / "classes.json").write_text(json.dumps(names))
    (some,) = group(gather([run]).runs)
    (plot,) = partition.make([some]).panels[0].plots.values()
    assert plot.y.names is not None
    assert len(set(plot.y.names)) == len(names["names"])


def test_an_older_run_has_the_figures_it_can_have(tmp_path: Path) -> None:
    data = shown(write_run(tmp_path / "old", recorded=False))
    missing = {some["id"] for some in data["figures"] if some["missing"]}
    assert missing == {"partition", "embeddings", "similarity", "drift", "confusion", "theory", "leaks"}
    assert figure(data, "time")["key"][0][0] == "train and combine"


def test_guidance_shows_both_bounds_of_the_step_and_asks_for_all_panels(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", method="fednh")
    path = folder / "rounds.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["theory"] = line.get("theory", {}) | {
            "which": "theorem 2", "lr": 0.05, "lr_max": 0.4, "lr_min": 0.1, "lam": None, "rho": 0.9,
            "rho_min": 1 - 1e-5, "holds": False,
        }  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = figure(shown(folder), "theory")
    names = [line["name"] for line in found["panels"][0]["plots"][""]["data"]]
    assert [name.split(", ")[-1] for name in names][1:] == ["at most", "at least"]
    assert "in all panels together" in found["caption"]
    row = dict(zip(*found["table"], strict=True))
    assert (row["lr_min"], row["rho_min"]) == ("0.1", "0.99999")


def test_an_unfinished_run_is_drawn_as_far_as_it_goes(tmp_path: Path) -> None:
    data = shown(write_run(tmp_path / "run", finished=False))
    assert "as it stood after round 6 of 12" in data["summary"]["rows"][0]["about"]
    assert data["summary"]["rows"][0]["cells"][0]["text"] != "-"
    assert figure(data, "clients")["missing"]
    line = figure(data, "accuracy")["panels"][0]["plots"]["rounds|classifier, all classes"]["data"][0]
    assert line["x"][-1] == 6


def test_runs_on_other_partitions_or_data_are_not_compared(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / f"a{seed}", "local", seed)
        write_run(tmp_path / f"b{seed}", "fedproto", seed)
    same = shown(tmp_path)
    assert not same["incomparable"]
    assert same["headline"]
    assert any(cell["place"] == 1 for row in same["summary"]["rows"] for cell in row["cells"])
    write_run(tmp_path / "c0", "fedavg", 0, changes=("model=cnn_digits",), split_seed=7)
    write_run(tmp_path / "c1", "fedavg", 1, changes=("model=cnn_digits",))
    other = shown(tmp_path)
    assert len(other["incomparable"]) == 1
    assert "partitions with seed 0" in other["incomparable"][0]
    assert not other["headline"]
    assert not any(cell["place"] for row in other["summary"]["rows"] for cell in row["cells"])


def test_partitions_are_compared_on_the_same_data(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "local")
    write_run(tmp_path / "b", "fedproto", changes=("partition=iid",), split_seed=3)
    write_run(tmp_path / "c", "fedproto", changes=("partition=dirichlet",), split_seed=4)
    runs = gather([tmp_path]).runs
    moved = [replace(r, partition=r.partition._replace(fingerprint="x")) if r.folder.name == "c" else r for r in runs]
    data, splits = incomparable(group(moved))
    assert data == "Different data: 'local', 'fedproto, partition=iid'; 'fedproto, partition=dirichlet'."
    assert splits.startswith("Different partitions with the same data and seed 0")
    assert splits.endswith(": 'local'; 'fedproto, partition=iid'.")


def test_a_long_label_is_not_replaced_by_a_longer_one(tmp_path: Path) -> None:
    name = "fedproto with a very strong pull towards the prototypes of all clients"
    folders = [f"{'a' * 80}{i}" for i in range(2)]
    for folder, lam in zip(folders, (2, 4), strict=True):
        write_run(tmp_path / folder, changes=(f"method.lam={lam}",))
    listing = [{"folder": folder, "labels": {"method": name}} for folder in folders]
    (tmp_path / "cells.json").write_text(json.dumps(listing))
    assert [some["label"] for some in shown(tmp_path)["methods"]] == [f"{name}, lam=2.0", f"{name}, lam=4.0"]


def mixed(folder: Path) -> None:
    """Local and FedAvg by classifier, FedProto by nearest prototype among own classes, each with what it stores."""
    own = ("method.inference=proto", "method.candidates=own")
    for method, changes, main, head in (("local", (), 0.8, 0.8), ("fedavg", (), 0.7, 0.7), ("fedproto", own, 0.6, 0.9)):
        path = write_run(folder / method, method, changes=("model=cnn_digits", *changes))
        rule = {"inference": "proto", "candidates": "own"} if changes else {"inference": "head", "candidates": "all"}
        numbers = {"accuracy_mean": main, "accuracy_head_mean": head, "accuracy_proto_mean": 0.6 if changes else None}
        for name, extra in (("summary.json", rule), ("rounds.jsonl", {})):
            lines = [json.loads(line) | numbers | extra for line in (path / name).read_text().splitlines()]
            (path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_methods_are_compared_by_one_rule_at_a_time(tmp_path: Path) -> None:
    mixed(tmp_path)
    data = shown(tmp_path)
    said = "Mean accuracy over clients by classifier, all classes, best first: fedproto 90.00 %, local 80.00 %, fedavg"
    assert data["headline"].startswith(said)
    assert "Methods judge by different rules" in data["headline"]
    titles = [column["title"] for column in data["summary"]["columns"]]
    assert titles[:2] == ["classifier, all classes", "nearest prototype, own classes"]
    cells = {row["label"]: [(cell["text"], cell["place"]) for cell in row["cells"]] for row in data["summary"]["rows"]}
    assert cells["local"][:2] == [("80.00†", 2), ("-", 0)]
    assert cells["fedproto"][:2] == [("90.00", 1), ("60.00†", 0)]
    worst = titles.index("worst tenth, classifier, all classes")
    assert [cells[label][worst][0] == "-" for label in ("local", "fedavg", "fedproto")] == [False, False, True]
    assert cells["fedproto"][titles.index("worst tenth, nearest prototype, own classes")][1] == 0
    plots = figure(data, "accuracy")["panels"][0]["plots"]
    assert "rounds|accuracy" not in plots
    lines = [one["name"] for one in plots["rounds|nearest prototype, own classes"]["data"]]
    assert lines == ["fedproto"], "a curve is of one rule"
    heads = {panel["label"]: panel["title"] for panel in figure(data, "clients")["panels"]}
    assert heads["fedproto"] == "fedproto, by nearest prototype, own classes"
    assert figure(data, "clients")["table"][0][1] == "judged by"
    assert figure(data, "confusion")["panels"][0]["title"] == "fedavg, by classifier, all classes"


def test_methods_that_judge_alike_are_ranked_in_one_column(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "local")
    write_run(tmp_path / "b")
    data = shown(tmp_path)
    assert "Methods judge by different rules" not in data["headline"]
    assert [panel["title"] for panel in figure(data, "clients")["panels"]] == ["local", "fedproto"]
    assert "worst tenth" in [column["title"] for column in data["summary"]["columns"]]


def test_a_file_that_a_finished_run_lacks_is_said(tmp_path: Path) -> None:
    (write_run(tmp_path / "a") / "clients.jsonl").unlink()
    assert "clients.jsonl is missing" in shown(tmp_path)["remarks"][0][1]


def test_short_names_are_told_apart() -> None:
    names = ["fedproto, lr=0.05", "fedproto, weak, lr=0.05", "fedproto, weak, lr=0.1", "local"]
    short = told_apart(names, 14)
    assert short[3] == "local"
    assert len(set(short)) == 4
    assert max(map(len, short)) <= 22
    assert told_apart(["local", "local"], 16) == ["local", "local"]


def test_numbers_on_paper_are_rounded_once() -> None:
    shown_ = [marks._written(value, ".0f") for value in (81.481, 13.467, 2.533, 0.533, 12.5, 0.49)]
    assert shown_ == ["81", "13", "3", "1", "13", "0"]
    assert [marks._written(value, ".1f") for value in (-0.04, 0.25, -0.25)] == ["0.0", "0.3", "-0.3"]


def test_many_classes_are_named_by_their_superclasses(tmp_path: Path) -> None:
    above = [f"kind {c % 4}" for c in range(40)]
    write_run(tmp_path / "run", classes=40, superclasses=above)
    data = shown(tmp_path)
    for name in ("similarity", "confusion"):
        (panel,) = figure(data, name)["panels"]
        assert panel["wide"]
        plot = panel["plots"][""]
        assert plot["data"][0]["y"][:2] == ["class 0 (kind 0)", "class 4 (kind 0)"]
        assert plot["layout"]["yaxis"]["ticktext"] == ["kind 0", "kind 1", "kind 2", "kind 3"]
        assert plot["layout"]["yaxis"]["tickvals"] == [4, 14, 24, 34]


def test_methods_with_prototypes_are_drawn_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "MOST_METHODS", 1)
    bare = write_run(tmp_path / "a", "local")
    kept = dict(np.load(bare / "views.npz"))
    np.savez(bare / "views.npz", **{**kept, "local_held": np.zeros_like(kept["local_held"])})
    write_run(tmp_path / "b")
    made = embeddings.make(group(gather([tmp_path]).runs))
    assert [panel.label for panel in made.panels] == ["fedproto"]
    assert made.notes[-1] == "Not drawn, because 2 are many: local."


def test_labels_say_what_differs_and_runs_that_repeat_count_once(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", changes=("method.lam=4",))
    write_run(tmp_path / "c", seed=1, changes=("method.lam=4",))
    write_run(tmp_path / "d")
    data = shown(tmp_path)
    assert [method["label"] for method in data["methods"]] == ["fedproto, lam=1.0", "fedproto, lam=4.0"]
    assert [folder.rpartition("/")[2] for folder, _ in data["left_out"]] == ["d"]
    listing = [
        {"folder": name, "labels": {"method": label}}
        for name, label in zip("abc", ("weak", "strong", "strong"), strict=True)
    ]
    (tmp_path / "cells.json").write_text(json.dumps(listing))
    assert [method["label"] for method in shown(tmp_path)["methods"]] == ["weak", "strong"]


def test_cells_that_a_sweep_no_longer_has_are_left_out(tmp_path: Path) -> None:
    for name, lam in (("kept", 2), ("stale", 4)):
        write_run(tmp_path / "sweep" / name, changes=(f"method.lam={lam}",))
    listing = [{"folder": name, "labels": {"method": "fedproto"}} for name in ("kept", "not-yet")]
    (tmp_path / "sweep" / "cells.json").write_text(json.dumps(listing))
    found = gather([tmp_path])
    assert [run.folder.name for run in found.runs] == ["kept"]
    assert [(out.folder.name, out.reason) for out in found.left_out] == [
        ("stale", "not a cell of sweep.toml (--all takes it)")
    ]
    assert len(gather([tmp_path], everything=True).runs) == 2
    assert [run.folder.name for run in gather([tmp_path / "sweep" / "stale"]).runs] == ["stale"], "where it is named"
    done = report(str(tmp_path), "--all", "--out", "page.html")
    assert "page.html (runs: 2)" in done.stdout
    (tmp_path / "sweep" / "cells.json").write_text("{")
    found = gather([tmp_path])
    assert len(found.runs) == 2
    assert "cells.json is damaged" in found.left_out[0].reason


def test_runs_that_are_not_finished_are_marked_and_failures_named(tmp_path: Path) -> None:
    write_run(tmp_path / "local", "local")
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, finished=False)
    (tmp_path / "b.failed.txt").write_text("the loss is not a number\nmore\n")
    data = shown(tmp_path)
    names = {method["label"]: method["name"] for method in data["methods"]}
    assert names == {"local": "local", "fedproto": "fedproto (1 of 2 seeds unfinished)"}
    assert data["unfinished"] == ["Not finished: fedproto, seed 1, after round 6 of 12."]
    assert any("failed after 6 of 12 rounds: the loss is not a number" in why for _, why in data["remarks"])
    (plot, *_) = figure(data, "accuracy")["panels"][0]["plots"].values()
    assert {one["name"] for one in plot["data"] if "name" in one} == set(names.values())
    assert figure(data, "clients")["panels"][0]["title"] == names["fedproto"]


def test_saved_figures_carry_the_warning(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", "local", split_seed=7)
    write_run(tmp_path / "runs" / "b", finished=False)
    gathered = gather([tmp_path / "runs"])
    caveats = html.data(gathered)["incomparable"]
    assert caveats
    _, drawn = html.build(gathered)
    few = [
        replace(some, paper=list(some.paper or some.panels[0].plots)[:1])
        for some in drawn
        if some.id in ("accuracy", "traffic")
    ]
    paper.save(few, tmp_path / "plain")
    paper.save(few, tmp_path / "warned", caveats=caveats)
    for path in (tmp_path / "warned").glob("*.svg"):
        assert "Different partitions with seed 0" in path.read_text(), path.name
        assert "Different partitions" not in (tmp_path / "plain" / path.name).read_text()
    write_report(gathered, tmp_path / "page.html", tmp_path / "figures")
    assert "Not finished: fedproto, seed 0, after round 6 of 12." in (tmp_path / "figures" / "drift.svg").read_text()


def test_runs_of_changed_code_are_not_ranked(tmp_path: Path) -> None:
    for seed, code in enumerate(("aa", "bb")):
        path = write_run(tmp_path / f"b{seed}", seed=seed) / "environment.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"own": {"mine:Net": code}}))
        write_run(tmp_path / f"a{seed}", "local", seed=seed)
    data = shown(tmp_path)
    assert "fedproto: its code was changed between its runs" in data["incomparable"][0]
    assert not data["headline"]


def test_labels_stay_short(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", changes=("partition=dirichlet", "model=mlp_digits"))
    labels = [method["label"] for method in shown(tmp_path)["methods"]]
    assert labels[1] == "fedproto, partition=dirichlet, model=mlp_digits"
    write_run(tmp_path / "c", changes=("partition=dirichlet", "partition.alpha=5.0"))  # the name alone is not enough
    labels = [method["label"] for method in shown(tmp_path)["methods"]]
    assert len(set(labels)) == 3
    assert max(map(len, labels)) < 70


def test_curves_are_means_over_seeds(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / str(seed), seed=seed) for seed in (0, 1, 2)]
    (some,) = group(gather([tmp_path]).runs)
    rows = [[json.loads(line) for line in (f / "rounds.jsonl").read_text().splitlines()] for f in folders]
    values = 100 * np.array([[line["accuracy_mean"] for line in lines] for lines in rows])
    line = curve(some, "accuracy_mean", 100.0)
    assert line is not None
    np.testing.assert_allclose(line.y, values.mean(0))
    np.testing.assert_allclose(line.high, values.mean(0) + values.std(0))
    sent = curve(some, "accuracy_mean", 100.0, "megabytes")
    assert sent is not None
    np.testing.assert_allclose(sent.x, 2700e-6 * np.arange(1, 13))


def test_fairness_by_hand() -> None:
    mean, worst, best, deviation, jain = clients.fairness([0.5] * 19 + [1.0])
    assert (mean, worst, best) == pytest.approx((52.5, 50.0, 75.0))
    assert deviation == pytest.approx(100 * np.std([0.5] * 19 + [1.0]))
    assert jain == pytest.approx(10.5**2 / (20 * (19 * 0.25 + 1)))
    assert clients.fairness([0.3, 0.3])[-1] == pytest.approx(1.0)
    assert clients.fairness([0.0, 0.0])[-1] == 1.0  # all equal, though at nothing


@pytest.mark.parametrize("sizes", [[135], [7], [98, 100]])
def test_bars_of_parts_of_the_clients_keep_the_mean_and_the_worst_tenth(tmp_path: Path, sizes: list[int]) -> None:
    (one,) = group(gather([write_run(tmp_path / "run")]).runs)
    rows = [np.random.default_rng(n).random(n) for n in sizes]
    line = one.runs[0].clients[0]
    runs = [replace(one.runs[0], clients=[line | {"client": i, "accuracy": a} for i, a in enumerate(r)]) for r in rows]
    bars, mean = clients._bars(replace(one, runs=runs)).marks
    assert mean.y == pytest.approx([100 * np.mean([row.mean() for row in rows])] * 2)
    worst = [y for y, colour in zip(bars.y, bars.colours, strict=True) if colour == clients.WORST]
    if len(bars.y) == 100:
        tenths = [np.interp(len(r) / 10, range(len(r) + 1), [0, *np.cumsum(np.sort(r))]) / (len(r) / 10) for r in rows]
        assert np.mean(worst) == pytest.approx(100 * np.mean(tenths))


def test_the_median_round_by_hand(tmp_path: Path) -> None:
    (one,) = group(gather([write_run(tmp_path / "run")]).runs)
    lines = [line | {"parts": {"train": t}} for line, t in zip(one.runs[0].rounds, (1.0, 2.0, 4.0, 9.0), strict=False)]
    timed, silent = (replace(one.runs[0], rounds=some) for some in (lines, [{"round": 1, "loss": 1.0}]))
    assert time.split(replace(one, runs=[timed, silent])) == {"train": 3.0}


def test_bytes_by_kind_add_up(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (some,) = group(gather([tmp_path]).runs)
    assert traffic.by_kind(some, "bytes_up") == pytest.approx({"prototypes": 800, "counts and header": 100})


def test_similarity_averages_several_prototypes_and_goes_by_superclass(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", classes=3, superclasses=["b", "a", "b"], names=["x", "y", "z"])
    some = views(True, 12, 3, np.random.default_rng(0))
    vectors = np.zeros((3, 4, 8), np.float32)
    vectors[-1, :, :3] = [[1, 0, 0], [0, 1, 0], [0, 0, 2], [5, 5, 5]]
    changed = {
        "global_prototypes": vectors,
        "global_held": np.array([[True, True, True, False]] * 3),
        "global_class": np.array([0, 0, 1, 2]),
    }
    np.savez(folder / "views.npz", **{**some, **changed})
    (run,) = gather([folder]).runs
    classes, cosine = similarity.cosines(run)
    assert classes.tolist() == [0, 1]
    np.testing.assert_allclose(cosine, np.eye(2), atol=1e-12)
    assert similarity.class_order(run, np.array([0, 1, 2])) == ([1, 0, 2], [1])


def test_confusion_is_added_over_seeds(tmp_path: Path) -> None:
    for seed in (0, 1):
        folder = write_run(tmp_path / str(seed), seed=seed, classes=2)
        np.savez(folder / "confusion.npz", personal=np.array([[3, 1], [0, 0]]) * (seed + 1))
    (heat,) = confusion.make(group(gather([tmp_path]).runs)).panels[0].plots[""].marks
    np.testing.assert_allclose(heat.z, [[75, 25], [np.nan, np.nan]])  # type: ignore[union-attr]


def test_projections_are_common_to_all_rounds_and_the_same_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    some = views(True, 12, 6, np.random.default_rng(0))
    some["z"][1:, 0] = some["z"][0, 0]  # a sample that stays where it is
    np.savez(folder / "views.npz", **some)
    (run,) = gather([folder]).runs
    chosen = projection.choose_samples(run)
    once, again = projection.project(run, chosen), projection.project(run, chosen)
    for name in ("t-SNE", "PCA"):
        np.testing.assert_array_equal(once[name].samples, again[name].samples)
    assert np.ptp(once["PCA"].samples[:, 0], axis=0) == pytest.approx([0, 0], abs=1e-9)
    assert np.ptp(once["PCA"].samples[:, 1], axis=0).max() > 0.1
    assert embeddings.make(group([run])).controls[1].options == ["1", "6", "12"]


def test_long_and_large_runs_stay_small(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / str(seed), seed=seed, rounds=1000, clients=1000, classes=40)
    data = shown(tmp_path)
    assert len(json.dumps(data)) < 3_000_000
    notes = " ".join(note for some in data["figures"] for note in some["notes"])
    for said in ("250 of 1,000 rounds", "1,000 are too many to draw", "400 of 1,000 clients"):
        assert said in notes


def test_figures_for_papers(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "local")
    write_run(tmp_path / "b", "fedproto", superclasses=["odd", "even"] * 3)
    _, drawn = html.build(gather([tmp_path]))
    few = [some for some in drawn if some.id in ("accuracy", "partition", "similarity", "traffic", "embeddings")]
    few = [some if some.paper is None else replace(some, paper=list(some.paper)[:1]) for some in few]
    count = paper.save(few, tmp_path / "figures")
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert len(names) == 3 * count
    for name in ("accuracy-rounds-classifier-all-classes.pdf", "partition.svg", "similarity.png", "traffic-share.pdf"):
        assert (tmp_path / "figures" / name).stat().st_size > 2000, name
    before = (tmp_path / "figures" / "accuracy-rounds-classifier-all-classes.svg").read_bytes()
    paper.save(few[:1], tmp_path / "figures")
    assert (tmp_path / "figures" / "accuracy-rounds-classifier-all-classes.svg").read_bytes() == before


def test_a_name_that_no_file_takes_breaks_no_report(tmp_path: Path) -> None:
    """Half of a surrogate, which JSON can write and UTF-8 cannot."""
    folder = write_run(tmp_path / "run", names=["\ud800", "b", "c", "d", "e", "f"])
    done = protofed("report", str(folder), "--out", str(tmp_path / "page.html"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").read_text(encoding="utf-8").count("<html")
    live = Live([folder]).now()
    assert json.loads(live.body)["methods"]


@pytest.mark.parametrize("key", ["seed", "method"])
def test_a_summary_without_what_it_must_have_is_damaged(key: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    del summary[key]
    (folder / "summary.json").write_text(json.dumps(summary))
    gathered = gather([folder])
    if key == "seed":
        assert "summary.json is damaged: seed is None" in str(gathered.left_out[0])
    with pytest.raises(UserError, match=f"is damaged: it has no {key}. Remove it, and continue with --resume"):
        printing.result(Console(), Result(folder, summary))


def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    bad = ["</script><script>alert(1)</script>", "<!--", "<b>c</b>", "&amp;", "\u2028", '"']
    page = html.page(gather([write_run(tmp_path / "run", names=bad)]))
    assert "alert(1)</script>" not in page
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    heat = figure(data, "similarity")["panels"][0]["plots"][""]["data"][0]
    assert heat["x"][2] == "&lt;b&gt;c&lt;/b&gt;"
