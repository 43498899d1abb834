"""The papers' tables and figures: entries are right and valid, they run, go on after a kill, and claims are judged."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkout import ROOT
from command import protofed
from rich.console import Console

from protofed import cli, run
from protofed.config.experiment import Experiment
from protofed.errors import UserError
from protofed.papers.reproduce import board, embed, figures, pages, plan, published, render
from protofed.papers.reproduce import run as running
from protofed.papers.reproduce.entry import PaperColumn, PaperEntry, entry_names, load_entry, parse
from protofed.papers.reproduce.measure import Done, Views, value
from protofed.papers.reproduce.result import EntryResult, again, cells, orderings, same_runs, with_earlier
from protofed.runs.measure import Result
from protofed.sweep import Cell

DATA = ("MNIST", "Digit-5", "Office-10", "DomainNet")
WANTED = {
    "fedproto": ["table-mnist", "table-femnist", "table-cifar10", "figure-tsne", "figure-k", "figure-lambda"],
    "fednh": [f"table-{t}-{d}" for t in (1, 3) for d in ("cifar10", "cifar100", "tiny")]
    + ["table-2", *(f"figure-{n}" for n in (1, 2, 3, 4, 6, 8))],
    "fedpr": ["figure-2", "figure-3"],
    "mpfedcl": [*(f"table-{n}" for n in (2, 5, 6, 7, 8)), *(f"figure-{n}" for n in (1, 5, 6, 7, 8, 9, 10))],
}


def test_every_table_and_figure_is_there() -> None:
    assert {f"{paper}/{name}" for paper, some in WANTED.items() for name in some} <= set(entry_names())


@pytest.mark.parametrize("name", entry_names())
def test_entry_is_valid(name: str) -> None:
    """Every run that it may ask for, in full, quick and on digits, is valid, and every column belongs to some run."""
    entry = load_entry(name)
    cells = plan.check_entry(entry)
    assert cells or entry.kind == "spiral"
    for column in entry.columns if cells else []:
        at = [all(cell.labels.get(k) == v for k, v in column.at.items()) for cell in cells]
        assert any(at), f"no run of {name} is in the column {column.name}"
    assert set(entry.reported) <= set(entry.rows)


# what is typed in, against the papers


@pytest.fixture(scope="module")
def papers() -> dict[str, str]:
    folder = ROOT.parent / "shared" / "papers"
    if not folder.is_dir():
        pytest.skip("needs the papers' texts in ../shared/papers")
    files = {"fedproto": "fedproto-v1-with-tables", "fednh": "fednh", "fedpr": "fedpr", "mpfedcl": "mp-fedcl"}
    return {paper: (folder / f"{file}.txt").read_text(encoding="utf-8") for paper, file in files.items()}


def test_fedproto_as_reported(papers: dict[str, str]) -> None:
    """Row by row: a method's six numbers follow each other in the paper's table."""
    text = re.sub(r"</?b>|</?math>|\s", "", papers["fedproto"].replace("$\\pm$", "±"))
    tables = dict(zip(("mnist", "femnist", "cifar10"), text.split("StdevofnTest".replace("n", "$n$"))[1:], strict=True))
    titles = {"fesem": "FeSEM", "fedprox": "FedProx", "fedper": "FedPer", "fedavg": "FedAvg"}
    titles |= {"fedproto": "FedProto", "fedproto-mh": "FedProto-mh"}
    for data, table in tables.items():
        spreads = ("2", "3") if data == "mnist" else ("1", "2")
        for row, numbers in load_entry(f"fedproto/table-{data}").reported.items():
            first, second = ("".join(n.replace(" ", "") for n in half) for half in (numbers[:3], numbers[3:6]))
            start = table.index(f"{titles[row]}{spreads[0]}{first}")
            assert f"{spreads[1]}{second}" in table[start : start + 200], (data, row)


@pytest.mark.parametrize("table", [1, 3])
def test_fednh_as_reported(papers: dict[str, str], table: int) -> None:
    lines = [re.sub(r"[^\d.±]+", " ", line).split() for line in papers["fednh"].splitlines() if "±" in line]
    lines = [[word for word in line if word != "±" and re.fullmatch(r"\d+\.\d+", word)] for line in lines]
    for data in ("cifar10", "cifar10-whole", "cifar100", "tiny"):
        for row, numbers in load_entry(f"fednh/table-{table}-{data}").reported.items():
            assert " ".join(numbers).replace(" ±", "").split() in lines, (data, row)


def test_fednh_fairness_as_reported(papers: dict[str, str]) -> None:
    tiny, whole = (load_entry(f"fednh/table-2-{data}").reported for data in ("tiny", "cifar10-whole"))
    for row, numbers in load_entry("fednh/table-2").reported.items():
        assert whole[row] == numbers[:2]
        numbers = [*numbers, *tiny[row]]
        pairs = "\t".join(f"{mean} ± {std}" for mean, std in zip(numbers[::2], numbers[1::2], strict=True))
        assert re.search(rf"^{row}\t{re.escape(pairs)}$", papers["fednh"], re.MULTILINE | re.IGNORECASE), row


@pytest.mark.parametrize("table", ["table-5", "table-6", "table-7", "table-8"])
def test_mpfedcl_as_reported(papers: dict[str, str], table: str) -> None:
    text = papers["mpfedcl"]
    for row, numbers in load_entry(f"mpfedcl/{table}").reported.items():
        written = [re.sub(r"(.*) ± (.*)", r"\1(\2)", number) for number in numbers]
        if table == "table-5":  # there a row is a domain
            assert all(number in text for number in written), row
            continue
        pieces = [written] if table == "table-6" else [written[:2], written[2:]]
        for piece in pieces:
            between = r" (?:\\approx 600 |\\approx 380 )?"
            assert re.search(between.join(map(re.escape, piece)), text), (row, piece)


def test_fedpr_and_counts_as_reported(papers: dict[str, str]) -> None:
    assert "FedPR and FedAvg is 94.62% and 91.57%" in papers["fedpr"]
    assert "FedPR and FedAvg is 86.05% and 79.04%" in papers["fedpr"]
    early = ["", ""]  # which the paper draws, and gives no numbers of
    assert load_entry("fedpr/figure-2").reported == {"fedavg": ["91.57"] * 2 + early, "fedpr": ["94.62"] * 2 + early}
    assert load_entry("fedpr/figure-3").reported == {"fedavg": ["79.04"] * 2 + early, "fedpr": ["86.05"] * 2 + early}
    (counts,) = load_entry("mpfedcl/table-2").reported.values()
    for title, model, prototypes, ratio in zip(DATA, counts[::3], counts[1::3], counts[2::3], strict=True):
        written = rf"{title} {int(model):,} {int(prototypes):,} \approx {float(ratio) / 100:.3f}"
        assert written in papers["mpfedcl"]


# judging


def _entry(**fields: Any) -> PaperEntry:
    usual: dict[str, Any] = {
        "name": "fedproto/x", "shows": "Table", "title": "t", "importance": 1, "about": "",
        "sweep": {"methods": {"a": ["method=local"], "b": ["method=fedavg"]}},
        "columns": [PaperColumn(title="x"), PaperColumn(title="y")],
    }  # fmt: skip
    return PaperEntry(**(usual | fields))


def _measured(**rows: dict[str, list[float | None]]) -> EntryResult:
    return EntryResult("fedproto/x", "", [0, 1], rows, [], {"1": 1.0}, "here", {})


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ([0.9, 0.8], [0.7, 0.7], "holds"),
        ([0.9, 0.6], [0.7, 0.7], "undecided"),
        ([0.6, 0.6], [0.7, 0.7], "does not hold"),
        ([0.7, 0.8], [0.7, 0.7], "undecided"),  # equal is not above
        ([0.9, None], [0.7, 0.7], "holds"),  # in the one seed that is there
    ],
)
def test_claims_hold_if_all_seeds_agree(ours: list[float | None], theirs: list[float | None], verdict: str) -> None:
    entry = _entry(claims=[{"is": "a", "above": ["b"]}])
    (found,) = orderings(entry, _measured(a={"x": ours}, b={"x": theirs}))
    assert [one.verdict for one in found.judged] == [verdict]


def test_the_papers_own_order_is_what_is_expected() -> None:
    entry = _entry(claims=[{"is": "a", "above": ["b"]}], reported={"a": ["90", "80 ± 1.5"], "b": ["95.5", "70"]})
    found = orderings(entry, _measured(a={"x": [0.9, 0.9], "y": [0.7, 0.6]}, b={"x": [0.95, 0.96], "y": [0.8, 0.8]}))
    assert [(one.text, judged.column, judged.verdict) for one in found for judged in one.judged] == [
        ("a above b", "y", "does not hold"),
        ("a below b", "x", "holds"),
    ]
    text = "\n".join(render.orders(entry, _measured(a={"x": [0.9, 0.9]}, b={"x": [0.95, 0.96]})))
    assert text == "- a below b: holds, x: -5.50 in 2 of 2 seeds."


def test_one_seed_is_said() -> None:
    entry = _entry(claims=[{"is": "a", "above": ["b"]}])
    one, both = {"x": [0.9, None], "y": [0.9, None]}, {"x": [0.9, None], "y": [0.9, 0.9]}
    less: dict[str, list[float | None]] = {"x": [0.8, 0.8], "y": [0.8, 0.8]}
    (text,) = render.orders(entry, _measured(a=one, b=less))
    assert text == "- a above b: holds in 2 of 2 (x +10.00; y +10.00), in one seed."
    (text,) = render.orders(entry, _measured(a=both, b=less))
    assert text == "- a above b: holds in 2 of 2 (x +10.00 in one seed; y +10.00)."


def test_what_is_not_measured_yet_is_named() -> None:
    measured = _measured(a={"x": [0.9, 0.8]})
    assert render.notes(_entry(), measured) == []
    measured = measured._replace(runs={"1": 1.0, "2": None})
    assert render.notes(_entry(), measured) == ["not measured yet: the row b and the column y."]
    assert render.notes(_entry(), measured._replace(label="quick version: smaller")) == []
    entry = _entry(reported={"a": ["90", "80"], "b": ["", "70"]})
    holed = _measured(a={"x": [0.9, 0.8]}, b={"y": [0.7, 0.7]})._replace(runs={"1": 1.0, "2": None})
    assert render.notes(entry, holed) == ["not measured yet: a in y."]


@pytest.mark.parametrize("wide", [30, 40, 80, 120, 200])
def test_tables_fit_the_screen(wide: int) -> None:
    """Whole names and whole numbers, whatever the width."""
    entry, measured = load_entry("fedproto/table-mnist"), published.kept()["fedproto/table-mnist"]
    console = Console(width=wide, record=True, file=io.StringIO())
    render.entry_text(console, entry, measured)
    text = console.export_text()
    lines = text[: text.index("- fedproto above")].splitlines()
    assert "…" not in text
    assert max(map(len, lines)) <= wide
    flat = " ".join(" ".join(lines).replace("│", " ").split())
    for row in ("local", "fedproto", "fedproto-mh"):
        numbers = [cells(entry, measured, row, column)[1] for column in entry.columns]
        for number in numbers:
            assert number in flat
        tables = -(-len(numbers) // 9) if wide >= 40 else 0
        assert len(re.findall(rf"^{row}[ ,]", "\n".join(lines), re.MULTILINE)) >= tables


def test_difference_is_ours_less_theirs() -> None:
    entry = _entry(reported={"a": ["90.5 ± 1.25", ""], "b": ["", ""]})
    table = render.entry_markdown(entry, _measured(a={"x": [0.93, 0.95]}))
    assert "| a | 90.50 ± 1.25 | 94.00 ± 1.00 | +3.50 |" in table


@pytest.mark.parametrize("text", ["97,1", "97 +- 1", "about 90"])
def test_a_reported_number_is_a_number(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        parse(text)


# measuring


def test_metrics(tmp_path: Path) -> None:
    def run(name: str, seconds: float) -> Result:
        folder = tmp_path / name
        folder.mkdir()
        lines = [{"round": r, "seconds": seconds, "acc": r / 100 if r % 2 else None} for r in range(1, 21)]
        (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        clients = [{"domain": d, "accuracy": a, "pm_l": a} for d, a in (("m", 0.5), ("u", 0.7), ("m", 0.7))]
        (folder / "clients.jsonl").write_text("".join(json.dumps(line) + "\n" for line in clients))
        return Result(folder, {"acc": 0.3, "none": None})

    slow, fast = run("slow", 2.0), run("fast", 0.5)
    done = Done(Cell({"method": "slow"}, Experiment(), "0"), slow)
    views = Views(_entry(), None, tmp_path)
    found = {
        metric: value(metric, done, lambda method: {"fast": fast}.get(method), views)
        for metric in (
            "acc",
            "acc@10",
            "acc@last",
            "none|acc",
            "none@last",
            "acc@time:fast",
            "acc@time:no",
            "domain:m",
            "spread:pm_l",
        )
    }
    assert found["acc"] == found["none|acc"] == 0.3
    assert found["acc@10"] == pytest.approx(0.05)
    assert found["acc@last"] == pytest.approx(0.15)
    assert found["acc@time:fast"] == pytest.approx(0.05)  # 10 s are five rounds of two seconds
    assert found["none@last"] is None
    assert found["acc@time:no"] is None
    assert found["domain:m"] == pytest.approx(0.6)
    assert found["spread:pm_l"] == pytest.approx(np.std([0.5, 0.7, 0.7]))


def test_validation_samples_choose_a_round_for_each_kind_of_model(tmp_path: Path) -> None:
    keys = ("validation_mean", "validation_global_mean", "accuracy_mean", "accuracy_global_mean")
    rows = [(0.5, 0.9, 0.61, 0.41), (0.8, 0.7, 0.62, 0.42), (0.8, 0.6, 0.99, 0.98)]
    lines = [{"round": r, **dict(zip(keys, row, strict=True))} for r, row in enumerate(rows, 1)]
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = Done(Cell({}, Experiment(), "0"), Result(tmp_path, {}))
    views = Views(_entry(), None, tmp_path)

    def of(metric: str) -> float | None:
        return value(metric, done, lambda method: None, views)

    assert of("accuracy_mean@chosen") == 0.62, "the first of the rounds that are best by the clients' models"
    assert of("accuracy_global_mean@chosen") == 0.41, "the best by the global model"
    assert of("accuracy_global_mean@best") == 0.98


def test_numbers_of_embeddings() -> None:
    y = np.tile(np.repeat(np.arange(3), 20), 2)
    client = np.repeat([0, 1], 60)
    centres = np.array([[1.0, 0, 0], [0, 1, 0.3], [0, 0.9, 0.5]])
    z = centres[y] + 0.01 * np.random.default_rng(0).normal(size=(120, 3))
    view = {"z": z, "y": y, "client": client, "classes": np.arange(3)}
    alike = embed.embedding_numbers(view)
    turned = embed.embedding_numbers(
        view | {"z": np.where(client[:, None] == 0, z, centres[(y + 1) % 3] + (z - centres[y]))}
    )
    for numbers in (alike, turned):
        assert all(number is not None for number in numbers.values())
    assert alike["agreement"] > 0.99 > 0.5 > turned["agreement"]  # type: ignore[operator]
    assert alike["classes"] > 0.7 > turned["classes"]  # type: ignore[operator]
    assert abs(alike["clients"]) < 0.3 < turned["clients"]  # type: ignore[operator, arg-type]
    assert alike["semantics"] > 0.5  # type: ignore[operator]
    away = embed.embedding_numbers(view | {"z": centres[y] + 2.0, "vectors": centres})
    assert away["distance"] == pytest.approx(4)
    groups = embed.embedding_numbers({"vectors": centres, "groups": np.array([0, 1, 1])})
    assert groups["gap"] == pytest.approx(groups["within"] - groups["between"])  # type: ignore[operator]
    assert groups["within"] > 0.9 > groups["between"]  # type: ignore[operator]


def test_a_plane_shows_each_clients_own_class_vectors() -> None:
    own = np.arange(24.0).reshape(2, 6, 2) + 1
    z = np.random.default_rng(0).normal(size=(12, 2))
    view = {"z": z, "y": np.tile(np.arange(6), 2), "client": np.repeat([4, 7], 6), "classes": np.arange(6)}
    view |= {"vectors": np.ones((6, 2)), "own": own}
    entry = load_entry("fednh/figure-2")
    done: Any = SimpleNamespace(
        cell=SimpleNamespace(labels={"method": "fedavg"}, experiment=SimpleNamespace(method_name="fedavg"))
    )
    views: Any = SimpleNamespace(view=lambda one: view)
    panels, _ = figures._panels(entry, [done], views)
    assert [panel.title for panel in panels] == ["fedavg, client 4", "fedavg, client 7"]
    for panel, head in zip(panels, own, strict=True):
        np.testing.assert_array_equal(panel.marks, head)


# the command


def _reproduce(*words: str) -> subprocess.CompletedProcess[str]:
    """Without any data."""
    clean = {key: text for key, text in os.environ.items() if key != "PROTOFED_DATA"}
    return protofed("reproduce", *words, env=clean)


def _shorter(name: str) -> PaperEntry:
    """The entry, with fewer methods, and fewer rounds of fewer clients on the digits."""
    entry = load_entry(name)
    assert entry.quick.digits is not None
    entry.quick.methods.extend(["fedavg", "fedproto", "fedproto-mh"])
    entry.quick.digits.changes.extend(["rounds=6", "clients=6", "engine=reference"])
    return entry


def _main(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """In this process, without any data."""
    monkeypatch.delenv("PROTOFED_DATA", raising=False)
    monkeypatch.setattr(sys, "argv", ["protofed", "reproduce", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code in (0, None), end.value.code


def test_list(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _main(monkeypatch, "--list")
    shown = capsys.readouterr().out
    for name in entry_names():
        assert f" {name} " in shown
    assert "on an H200" in shown
    assert "data: mnist (not found)" in shown


def test_list_says_which_data_there_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("here").mkdir()
    images, labels = np.zeros((8, 4, 4), np.uint8), np.arange(8) % 2
    for name in ("mnist", "tiny_imagenet32_20c"):
        np.savez(f"here/{name}.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    _main(monkeypatch, "--list", "fedproto/table-mnist", "fednh/table-1-tiny", "fednh/figure-1", "--data-dir", "here")
    data = [line.strip() for line in capsys.readouterr().out.splitlines() if "data: " in line]
    assert data[0] == "data: mnist"
    assert data[1].startswith("data: tiny_imagenet (not found); stand-in: 20 of Tiny-ImageNet's 200 classes")
    assert len(data) == 2


@pytest.mark.slow
def test_table_mnist_quick_without_any_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "load_entry", _shorter)
    done = _reproduce("fedproto/table-mnist", "--quick", "--out", "out", "--jobs", "1")
    assert done.returncode == 0, done.stderr
    assert "on the built-in 8x8 digits" in done.stdout
    assert "quick version" in done.stdout
    assert re.search(r"^fedproto +│ 97\.13 ± 0\.30 │ \d\d\.\d\d ± \d+\.\d\d │", done.stdout, re.MULTILINE)
    assert re.search(r"^- fedproto above fedavg: (holds|does not hold|undecided)", done.stdout, re.MULTILINE)
    folder = Path("out/fedproto/table-mnist-quick")
    measured = EntryResult.load(folder / "result.json")
    assert list(measured.rows) == ["fedavg", "fedproto", "fedproto-mh"]
    assert measured.missing == 0
    for row in measured.rows.values():
        assert all(0.5 < number <= 1 for number in row["half-range 2, n = 3"] if number is not None)
    page_of = (folder / "result.md").read_text()
    assert "**quick version" in page_of
    assert re.search(
        r"This quick version: `fedproto/mnist_n3`; `rounds=6`; `data=digits`.*; seeds 0, 1\.$", page_of, re.M
    )
    _main(monkeypatch, "fedproto/table-mnist", "--quick", "--out", "out")
    assert "all 6 cells are finished" in capsys.readouterr().out
    assert EntryResult.load(folder / "result.json") == measured
    elsewhere = next(Path("out/runs").glob("*/environment.json"))
    elsewhere.write_text(json.dumps(json.loads(elsewhere.read_text()) | {"device": "NVIDIA H200"}))
    _main(monkeypatch, "fedproto/table-mnist", "--quick", "--out", "out")
    assert re.search(r"on \d+ CPU cores, NVIDIA H200\.", capsys.readouterr().out)


@pytest.mark.slow
def test_a_killed_one_goes_on() -> None:
    command = [
        sys.executable,
        "-m",
        "protofed",
        "reproduce",
        "fedpr/figure-2",
        "--quick",
        "--out",
        "out",
        "--jobs",
        "1",
    ]
    env = {key: text for key, text in os.environ.items() if key != "PROTOFED_DATA"}
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    runs = Path("out/runs")
    deadline = time.monotonic() + 300
    while not list(runs.glob("*/summary.json")) and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert first.poll() is None, "it ended before it could be killed"
    first.send_signal(signal.SIGKILL)
    first.wait()
    finished = {path: path.stat().st_mtime_ns for path in runs.glob("*/summary.json")}
    assert 1 <= len(finished) < 4
    again = _reproduce("fedpr/figure-2", "--quick", "--out", "out", "--jobs", "1")
    assert again.returncode == 0, again.stderr
    assert f"{len(finished)} finished before" in again.stdout
    assert len(list(runs.iterdir())) == 4
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    for kind in ("png", "svg", "pdf"):
        assert Path(f"out/fedpr/figure-2-quick/figure.{kind}").stat().st_size > 5000
    (sorted(runs.iterdir())[0] / "clients.jsonl").unlink()
    less = _reproduce("fedpr/figure-2", "--quick", "--out", "out", "--jobs", "1")
    assert less.returncode == 1
    assert "its files are damaged. Remove" in less.stdout


def test_a_run_whose_models_are_gone_is_left_out_by_name() -> None:
    entry = load_entry("fednh/figure-3")
    done = []
    for method in ("fedavg", "fednh"):
        plan = Experiment.load("demo", f"method={method}", "model=mlp_digits", "clients=3", "rounds=1")
        done.append(Done(Cell({"experiment": "demo", "method": method, "seed": "0"}, plan, method), run(plan, method)))
    shutil.rmtree("fedavg/checkpoints")
    kept, lost = running._shown(done, Views(entry, None, Path("views")))
    assert [one.cell.labels["method"] for one in kept] == ["fednh"]
    assert lost == ["demo, fedavg, seed 0: its models, which are shown, are gone. Remove fedavg to run it again"]
    numbers = Views(load_entry("fednh/table-2"), None, Path("views"))
    assert running._shown(done, numbers) == (done, [])  # which need no models
    (Path("fednh") / "clients.jsonl").unlink()
    (Path("fedavg") / "rounds.jsonl").write_text("")
    kept, lost = running._shown(done, numbers)
    assert not kept
    assert lost[0] == "demo, fedavg, seed 0: its files are damaged. Remove fedavg to run it again"


def test_a_number_at_the_time_of_a_run_that_is_missing_is_not_measured() -> None:
    entry = _entry(
        sweep={"experiment": "demo", "seeds": [0], "methods": {"local": [], "fedavg": []}},
        columns=[PaperColumn(title="x", metric="accuracy_mean@time:fedavg")],
    )
    changes = ["rounds=2", "clients=3", "model=mlp_digits"]
    made = plan.EntryPlan(entry, False, plan._cells("demo", entry.sweep, changes, {}), [], "")
    done = [Done(cell, run(cell.experiment, cell.hash)) for cell in made.cells]
    views = Views(entry, None, Path("views"))
    assert running.measure_columns(made, done, views).missing == 0
    assert running.measure_columns(made, done[:1], views).missing == 2


def test_a_damaged_view_is_computed_anew() -> None:
    plan = Experiment.load("demo", "method=fednh", "model=mlp_digits", "clients=3", "rounds=1")
    done = Done(Cell({"experiment": "demo", "method": "fednh", "seed": "0"}, plan, "fednh"), run(plan, "fednh"))
    views = Views(load_entry("fednh/figure-3"), None, Path("views"))
    first = views.view(done)
    Path("views/fednh.npz").write_bytes(Path("views/fednh.npz").read_bytes()[:100])
    again = views.view(done)
    assert {key: array.tobytes() for key, array in again.items()} == {key: a.tobytes() for key, a in first.items()}


@pytest.mark.slow
def test_time_that_is_up_stops_cleanly() -> None:
    words = ("fednh/figure-2", "--quick", "--out", "out", "--jobs", "1")
    done = _reproduce(*words, "--limit", "1s")
    assert done.returncode == 130, done.stdout + done.stderr
    assert "time is up before all was finished. Run the same command to continue." in done.stdout
    assert 1 <= EntryResult.load(Path("out/fednh/figure-2-quick/result.json")).missing <= 6  # some may have been done


def test_what_is_stopped_does_not_go_on_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "run_cells", stopped)
    report = running.reproduce(["fednh/figure-1", "fedpr/figure-2"], Path("out"), quick=True)
    assert report.stopped == "stopped"
    assert report.skipped == ["fednh/figure-1: not begun"]
    monkeypatch.setattr(running.special, "spirals", stopped)
    report = running.reproduce(["fednh/figure-1"], Path("out"), quick=True)
    assert report.skipped == ["fednh/figure-1: not finished; it cannot be resumed, and starts over next time"]


@pytest.mark.slow
def test_a_part_of_the_runs() -> None:
    words = ("fedpr/figure-2", "--quick", "--out", "out", "--jobs", "1")
    done = _reproduce(*words, "--only", "seed=0", "--only", "method=fedpr")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "3 runs are not finished; 'protofed reproduce fedpr/figure-2 --quick' continues with the same --out."
        in done.stdout
    )
    measured = EntryResult.load(Path("out/fedpr/figure-2-quick/result.json"))
    assert list(measured.rows) == ["fedpr"]
    assert len(list(Path("out/runs").iterdir())) == 1


def test_partitions_and_counts_need_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    _main(monkeypatch, "mpfedcl/table-2", "mpfedcl/figure-6", "--quick", "--out", "out")
    assert Path("out/mpfedcl/figure-6-quick/mnist.png").is_file()
    assert not Path("out/runs").exists()


DIGIT5 = "experiment=mpfedcl/digit5_feature"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fedproto/table-mnist", "--out", "out"], "needs data that is not there"),
        (["fedproto/table-minst"], "Did you mean 'fedproto/table-mnist'"),
        (["fedpr/figure-2", "--quick", "--limit", "soon"], "should be a time"),
        ([], "--list"),
        (["--write", "--out", "out"], "for a checkout"),
        (["nothing/"], "names nothing"),
        (["fedpr/figure-2", "--quick", "--only", "seed"], "should be label=value"),
        (["--write", "--check"], "Use one of them"),
        (["fedproto/table-mnist", "--data-dir", "nowhere"], "not there: mnist, and nowhere is not a folder"),
        (
            [
                *["fedpr/figure-2", "mpfedcl/table-5", "--quick", "--out", "out", "--only", "method=fedpr", "--only"],
                DIGIT5,
            ],
            "no run of what was named is all of this",
        ),
        (["mpfedcl/table-2", "--quick", "--only", "seed=0"], "mpfedcl/table-2 has no runs to choose from"),
        (["fednh/figure-1", "--quick", "--write", "--out", "out"], "for a checkout"),
        (["fedpr/figure-2", "--quick", "--out", "out", "--only", "seed=7"], "seed is one of 0, 1"),
        (["fedpr/figure-2", "--quick", "--out", "out", "--only", "x=7"], "labels are experiment, method, seed"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PROTOFED_DATA", raising=False)
    monkeypatch.setattr(sys, "argv", ["protofed", "reproduce", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line
    assert not Path("out").exists()


def test_domains_that_are_there_are_used(real_data: Path) -> None:
    made = plan.plan_entry(load_entry("mpfedcl/table-5"), False, real_data)
    assert made.left_out == ["mpfedcl/digit5_feature: without synth, which was not found"]
    assert {cell.experiment.clients for cell in made.cells} == {4}
    made = plan.plan_entry(load_entry("fedproto/figure-lambda"), False, real_data)
    assert made.label == "MNIST instead of FEMNIST"


def test_a_data_set_of_several_files_is_there_if_all_are(tmp_path: Path) -> None:
    entry = load_entry("fednh/table-1-cifar10-whole")
    for name in ("cifar10", "cifar10_rest_a"):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((4, 2)), y=np.arange(4) % 2)
    with pytest.raises(UserError, match="cifar10, cifar10_rest_a, cifar10_rest_b, and there is none"):
        plan.plan_entry(entry, False, tmp_path)
    np.savez(tmp_path / "cifar10_rest_b.npz", x=np.zeros((4, 2)), y=np.arange(4) % 2)
    made = plan.plan_entry(entry, False, tmp_path)
    assert {tuple(cell.experiment.data.more) for cell in made.cells} == {("cifar10_rest_a", "cifar10_rest_b")}
    assert not made.left_out
    quick = plan.plan_entry(entry, True, None)
    assert {(cell.experiment.data.name, *cell.experiment.data.more) for cell in quick.cells} == {("digits",)}


def test_what_is_said_of_the_whole_cifar10_is_said_of_the_same_runs() -> None:
    """Table 2 looks at runs of table 1; figure 4 and table 3 make others, all on the three files."""
    first, second, third, figure = (
        {cell.hash: cell.experiment for cell in plan.check_entry(load_entry(f"fednh/{name}-cifar10-whole"))}
        for name in ("table-1", "table-2", "table-3", "figure-4")
    )
    assert set(second) < set(first)
    assert not set(third) & set(first)
    assert {plan.participation for plan in third.values() if plan.rounds == 200} == {0.3}
    assert {plan.method.rho for plan in figure.values() if plan.rounds == 200} == {0.1, 0.3, 0.5, 0.7, 0.9}
    whole = [plan for plan in {**first, **third, **figure}.values() if plan.data.name == "cifar10"]
    assert {tuple(plan.data.more) for plan in whole} == {("cifar10_rest_a", "cifar10_rest_b")}


def test_unipen_stands_in_for_femnist(real_data: Path, tmp_path: Path) -> None:
    entry = load_entry("fedproto/table-femnist")
    made = plan.plan_entry(entry, False, real_data)
    assert "UNIPEN instead of FEMNIST" in made.label
    assert {cell.experiment.data.name for cell in made.cells} == {"unipen62_128"}
    assert {cell.experiment.partition.short for cell in made.cells} == {"fewer"}
    with pytest.raises(UserError, match="femnist, and there is none of it in"):
        plan.plan_entry(entry, False, tmp_path)


# the page


def test_the_pages_of_results_are_what_their_generator_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    written = pages.pages(published.kept())
    assert set(pages.FOLDER.iterdir()) | {pages.OVERVIEW, board.PAGE} == set(written)
    for path, text in written.items():
        assert path.read_text(encoding="utf-8") == text


def test_what_is_measured_has_a_finding() -> None:
    """The overview says in a sentence what every table shows."""
    overview = pages.pages(published.kept())[pages.OVERVIEW]
    for name in entry_names():
        finding = load_entry(name).finding
        assert (name in published.kept()) == bool(finding), name
        assert finding in overview
        assert f"(results/{name.partition('/')[0]}.md#{name.replace('/', '')})" in overview


def test_write_brings_results_into_the_page() -> None:
    for path in (pages.OVERVIEW, published.NUMBERS):
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, path)
    columns = [column.name for column in load_entry("fedpr/figure-2").columns]
    rows = {row: {name: [x, x] for name in columns} for row, x in (("fedavg", 0.9157), ("fedpr", 0.9462))}
    result, picture = Path("out/fedpr/figure-2/result.json"), Path("out/fedpr/figure-2/figure.png")
    measured = EntryResult("fedpr/figure-2", "", [0, 1], rows, [], {"r": 30.0, "s": 30.0}, "a machine", {})
    measured.save(result)
    picture.write_bytes(b"a picture")
    assert published.write_page(Path("out"))[0].startswith(
        "fedpr/figure-2: left as it is: its 6 runs are of other settings"
    )
    numbers = json.loads(published.NUMBERS.read_text())
    published.NUMBERS.write_text(
        json.dumps(numbers | {"fedpr/figure-2": numbers["fedpr/figure-2"] | {"runs": {"x": 1.0}}})
    )
    assert (
        published.write_page(Path("out"))[0] == "fedpr/figure-2: 2 seeds, instead of 1 runs of other settings or data"
    )
    text = (pages.FOLDER / "fedpr.md").read_text(encoding="utf-8")
    assert "| fedpr | 94.62 | 94.62 ± 0.00 | +0.00 |" in text
    assert "measured, 2 seeds: 60 s of runs on a machine" in text
    assert "](../images/reproduce/fedpr-figure-2-figure.png)" in text
    assert Path("docs/images/reproduce/fedpr-figure-2-figure.png").read_bytes() == b"a picture"
    assert json.loads(published.NUMBERS.read_text())["fedpr/figure-2"]["seeds"] == [0, 1]

    # another machine has made one of the runs anew
    rows = {"fedpr": {name: [None, 0.96] for name in columns}}
    measured._replace(rows=rows, runs={"r": None, "s": 39.0}, machine="another").save(result)
    picture.write_bytes(b"of one run")
    said = published.write_page(Path("out"))[0]
    assert said.startswith("fedpr/figure-2: 2 seeds, runs that stay from before: 1, and so do its pictures")
    text = (pages.FOLDER / "fedpr.md").read_text(encoding="utf-8")
    assert "| fedpr | 94.62 | 95.31 ± 0.69 | +0.69 |" in text
    assert "measured, 2 seeds: 69 s of runs on another, a machine" in text
    assert Path("docs/images/reproduce/fedpr-figure-2-figure.png").read_bytes() == b"a picture"

    # and a third one makes some only to see how far they are from those
    rows = {"fedpr": {name: [None, 0.95] for name in columns}, "fedavg": {name: [None, 0.9157] for name in columns}}
    measured._replace(rows=rows, runs={"r": None, "s": 9.0}, machine="a third").save(result)
    far = f"{2 * len(columns)} numbers on a third, 0.50 points apart on average, 1.00 at most"
    far += f" (fedpr, {columns[0]}, seed 1: 95.00 instead of 96.00)"
    assert published.note_difference(Path("out")) == [f"fedpr/figure-2: {far}"]
    text = (pages.FOLDER / "fedpr.md").read_text(encoding="utf-8")
    assert f"Repeated runs: {far}." in text
    assert "| fedpr | 94.62 | 95.31 ± 0.69 | +0.69 |" in text
    shutil.rmtree("out")
    assert published.note_difference(Path("out"))[0].startswith("nothing is noted")


def test_how_far_numbers_are_from_those_of_before() -> None:
    entry = load_entry("fedpr/figure-2")
    name, rows = entry.columns[0].name, {"fedpr": {entry.columns[0].name: [0.5, 0.6]}}
    before = EntryResult(entry.name, "", [0, 1], rows, [], {"1": 1.0, "2": 1.0}, "m", {"e": "1"})
    now = before._replace(rows={"fedpr": {name: [None, 0.6]}}, machine="n")
    assert again(entry, before, now) == "1 number on n, the same"
    assert again(entry, before, now._replace(rows={"fedpr": {"no column": [0.1, 0.1]}})) == ""
    for other in ({"label": "quick"}, {"data": {"e": "2"}}, {"runs": {"3": 1.0}}):
        assert again(entry, before, now._replace(**other)) == ""


def test_numbers_of_several_machines_are_joined_where_the_runs_are_the_same() -> None:
    rows: dict[str, dict[str, list[float | None]]] = {"a": {"x": [0.5, None]}, "b": {"x": [0.1, 0.2]}}
    before = EntryResult("x", "", [0, 1], rows, ["c"], {"1": 5.0, "2": None}, "m", {"e": "1"})
    rows = {"a": {"x": [0.6, 0.7], "y": [1.0, None]}}
    now = EntryResult("x", "", [0, 1], rows, [], {"1": None, "2": 2.0}, "n", {"f": "2"})
    both = with_earlier(before, now)
    assert both.rows == {"a": {"x": [0.6, 0.7], "y": [1.0, None]}, "b": {"x": [0.1, 0.2]}}
    assert (both.runs, both.missing, both.seconds, both.machine) == ({"1": 5.0, "2": 2.0}, 0, 7.0, "n, m")
    assert both.data == {"e": "1", "f": "2"}
    assert with_earlier(now, now) == now
    part = now._replace(runs={"2": 2.0}, left_out=["half of the data"])  # with less data there
    assert with_earlier(before, part).runs == {"1": 5.0, "2": 2.0}
    assert with_earlier(before, part).left_out == ["c"]
    assert with_earlier(before._replace(runs={"2": 1.0}), now).runs == {"1": None, "2": 2.0}
    assert same_runs(before, part)
    assert same_runs(before, now)
    replanned = now._replace(runs={"1": None, "3": 2.0})  # a run that was never made is another one now
    assert same_runs(before, replanned)
    assert with_earlier(before, replanned).runs == {"1": 5.0, "3": 2.0}
    others: list[dict[str, Any]] = [{"label": "quick"}, {"seeds": [0, 2]}, {"runs": {"3": 1.0}}, {"data": {"f": "3"}}]
    assert not any(same_runs(before._replace(**other), now) for other in others)


def test_a_time_is_given_where_all_of_it_is_known() -> None:
    measured = _measured(a={"x": [0.5, 0.5]})._replace(runs={"1": 5.0, "2": 0.0, "3": None})
    assert (measured.seconds, measured.missing) == (0.0, 1)


def test_fewer_seeds_are_said() -> None:
    entry = _entry(claims=[{"is": "a", "above": ["b"]}])
    measured = _measured(a={"x": [0.5, 0.7], "y": [0.5, None]}, b={"x": [0.4, None], "y": [0.1, None]})
    text = render.entry_markdown(entry, measured)
    assert "| a | 60.00 ± 10.00 | 50.00 [1] |" in text
    assert "(x +10.00; y +40.00), in one seed." in text
    assert render.notes(entry, measured)[0].startswith("[n]: a mean over n seeds only")
    assert render.notes(entry, _measured(a={"x": [0.5, None]})) == ["all numbers are of one seed."]


def test_a_line_is_of_seeds_that_all_its_points_have() -> None:
    measured = _measured(a={"x": [0.5, 0.7], "y": [0.4, None]}, b={"x": [0.1, None], "y": [None, 0.2]})
    fair = figures._fair(measured, [("1", "x"), ("2", "y"), ("3", "z")]).rows
    assert fair == {"a": {"x": [0.5, None], "y": [0.4, None]}, "b": {"x": [0.1, None], "y": [None, 0.2]}}


def test_a_figure_of_numbers_is_drawn_anew_when_numbers_join() -> None:
    for path in (pages.OVERVIEW, published.NUMBERS):
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, path)
    kept = published.kept()["fednh/figure-4"]
    missing = next(run for run, seconds in kept.runs.items() if seconds is None)
    rows: dict[str, dict[str, list[float | None]]] = {"fednh": {"CIFAR-10, GM, rho = 0.1": [None, 0.5, None]}}
    some = kept._replace(rows=rows, runs={run: 1.0 if run == missing else None for run in kept.runs})
    some.save(Path("out/fednh/figure-4/result.json"))
    picture = pages.IMAGES / "fednh-figure-4-figure.png"
    picture.parent.mkdir(parents=True)
    picture.write_bytes(b"an old one")
    assert "pictures" not in published.write_page(Path("out"))[0]
    assert picture.stat().st_size > 5000
