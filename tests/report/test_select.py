"""Hyperparameters chosen on validation samples, and never by what is then reported."""

import csv
import io
from pathlib import Path

import pytest
from command import protofed
from test_table import folder

from protofed import UserError
from protofed.report import render
from protofed.report.gather import collect
from protofed.report.tabulate import tabulate

HELD = "evaluate.validation=0.25"


def tried(method: str, lr: float, test: list[float], validation: list[float | None], rounds: int = 1) -> None:
    """Runs of one set of parameters, by seed: their accuracy on test and on validation samples."""
    for seed, (accuracy, held) in enumerate(zip(test, validation, strict=True)):
        lines = [{"round": number + 1, "accuracy_mean": accuracy} for number in range(rounds)]
        if held is not None:
            lines[-1] |= {"validation_mean": held}
        words = [f"method={method}", f"optimizer.lr={lr}", f"seed={seed}", f"rounds={rounds}"]
        words += [HELD] if held is not None else []
        folder(f"runs/{method}-{lr}-{seed}", accuracy, *words, rounds=lines)


def test_the_best_on_validation_is_shown_and_not_the_best_on_test() -> None:
    tried("local", 0.1, [0.5, 0.7], [0.7, 0.9])
    tried("local", 0.2, [0.99, 0.99], [0.6, 0.8])
    tried("fedproto", 0.1, [0.3, 0.3], [0.5, 0.5])
    tried("fedproto", 0.2, [0.4, 0.6], [0.5, 0.7])
    tried("fedproto", 0.3, [0.9, 0.9], [0.1, 0.2])
    table = tabulate(collect("runs"), "accuracy", "local", select="validation")
    assert {row.told: row.entries["", "accuracy"].mean for row in table.rows} == {
        "fedproto (lr=0.2)": pytest.approx(0.5), "local (lr=0.1)": pytest.approx(0.6),
    }  # fmt: skip
    assert table.rows[0].entries["", "accuracy"].test.difference == pytest.approx(-0.1)  # type: ignore[union-attr]
    said = "\n".join(table.notes)
    assert (
        "parameters are chosen by accuracy on validation samples (the clients' own, mean over clients and seeds" in said
    )
    assert (
        "chosen for local: lr=0.1, of 2 candidates, with 80.00 % on validation samples; the next best had 70.00 %"
        in said
    )
    assert "methods had different numbers of candidates (2: local; 3: fedproto)" in said
    assert "fedproto (lr=0.2) & " in render.latex(table)
    (caption,) = [line for line in render.latex(table).splitlines() if line.startswith(r"\caption")]
    assert "parameters chosen on validation samples" in caption
    assert "chosen on" not in render.caption(tabulate(collect("runs"), "accuracy"))
    assert "| local (lr=0.1) |" in render.markdown(table)
    rows = list(csv.DictReader(io.StringIO(render.as_csv(table))))
    assert [(row["row"], row["chosen"], row["candidates"]) for row in rows] == [
        ("fedproto", "lr=0.2", "3"), ("local", "lr=0.1", "2"),
    ]  # fmt: skip
    assert float(rows[1]["validation"]) == pytest.approx(0.8)
    assert "chosen" not in render.as_csv(tabulate(collect("runs"), "accuracy"))


def test_each_setting_has_its_own_choice() -> None:
    for clients, best in ((4, 0.1), (8, 0.2)):
        for lr in (0.1, 0.2):
            line = {"round": 1, "validation_mean": 0.9 if lr == best else 0.1}
            words = ("method=local", f"clients={clients}", f"optimizer.lr={lr}", HELD)
            folder(f"runs/{clients}-{lr}", lr, *words, rounds=[line])
    (row,) = tabulate(collect("runs"), "accuracy", select="validation").rows
    assert row.told == "local (clients=4: lr=0.1; clients=8: lr=0.2)"
    assert [entry.mean for entry in row.entries.values()] == [0.1, 0.2]


def test_the_best_round_is_chosen_by_where_its_numbers_are_shown() -> None:
    for lr, held in ((0.1, (0.9, 0.2)), (0.2, (0.5, 0.6))):
        lines = [{"round": n, "accuracy_mean": n / 10, "validation_mean": v} for n, v in enumerate(held, 1)]
        folder(f"runs/{lr}", 0.2, "method=local", f"optimizer.lr={lr}", HELD, "rounds=2", rounds=lines)
    last = tabulate(collect("runs"), "accuracy", select="validation")
    assert last.rows[0].told == "local (lr=0.2)"
    best = tabulate(collect("runs"), "accuracy@validation", select="validation")
    assert best.rows[0].told == "local (lr=0.1)"
    assert "in the best round" in best.notes[0]


def test_a_global_model_may_be_what_counts() -> None:
    for lr, own, whole in ((0.1, 0.9, 0.2), (0.2, 0.5, 0.6)):
        line = {"round": 1, "validation_mean": own, "validation_global_mean": whole}
        folder(f"runs/{lr}", 0.2, "method=fedavg", f"optimizer.lr={lr}", HELD, rounds=[line])
    chosen = {by: tabulate(collect("runs"), "accuracy", select=by) for by in ("validation", "validation-global")}
    assert [table.rows[0].told for table in chosen.values()] == ["fedavg (lr=0.1)", "fedavg (lr=0.2)"]


def test_without_validation_samples_nothing_is_chosen() -> None:
    tried("local", 0.1, [0.5], [None])
    with pytest.raises(
        UserError, match=r"no accuracy on validation samples, and choosing on the test set is not offered"
    ):
        tabulate(collect("runs"), "accuracy", select="validation")
    with pytest.raises(UserError, match=r"--select 'test' is unknown.*The test set is never chosen by"):
        tabulate(collect("runs"), "accuracy", select="test")
    done = protofed("table", "runs", "--select", "validation")
    assert done.returncode == 2
    assert "Run with evaluate.validation=0.1" in done.stderr


def test_a_candidate_that_lacks_seeds_is_not_compared() -> None:
    tried("local", 0.1, [0.5, 0.6], [0.5, 0.5])
    tried("local", 0.2, [0.9], [0.9])
    table = tabulate(collect("runs"), "accuracy", select="validation")
    assert table.rows[0].told == "local (lr=0.1)"
    assert any("1 candidates lack seeds and were not compared" in note for note in table.notes)
    words = ("method=local", "optimizer.lr=0.2", "seed=7", "rounds=1", HELD)
    folder("runs/more", 0.9, *words, rounds=[{"round": 1, "validation_mean": 0.9}])
    with pytest.raises(UserError, match="the candidates of local have different seeds"):
        tabulate(collect("runs"), "accuracy", select="validation")


def test_either_deviation_is_shown_and_said() -> None:
    tried("local", 0.1, [0.1, 0.3], [0.5, 0.5])
    for deviation, shown in (("population", "10.00"), ("sample", "14.14")):
        table = tabulate(collect("runs"), "accuracy", deviation=deviation)
        assert f"| 20.00 ± {shown} |" in render.markdown(table)
        assert f"standard deviation (of the {deviation}) over seeds 0, 1" in render.markdown(table)
        (row,) = csv.DictReader(io.StringIO(render.as_csv(table)))
        assert row["deviation"] == deviation
        assert f"{100 * float(row['std']):.2f}" == shown
    with pytest.raises(UserError, match=r"--deviation 'samples' is unknown\. Did you mean 'sample'"):
        tabulate(collect("runs"), "accuracy", deviation="samples")
    done = protofed("table", "runs", "--deviation", "sample", "--select", "validation", "--out", "t.tex")
    assert done.returncode == 0, done.stderr
    assert r"14.14" in Path("t.tex").read_text()
