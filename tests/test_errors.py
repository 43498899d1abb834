"""Errors name what their user can change, in the words of a shell or of Python."""

from pathlib import Path

import pytest

import protofed
from protofed.errors import UserError, did_you_mean, in_python, option
from protofed.runs.folder import RunFolder


def refuse(path: str = "a --model of that width") -> None:
    raise UserError(
        f"{option('data-dir', path)} is not a folder. Use {option('model')}, {option('resume', True)} or another "
        f"{option('out')}."
    )


def test_options_are_spelt_for_the_shell_and_for_python() -> None:
    with pytest.raises(UserError) as shell:
        refuse("x")
    assert str(shell.value) == "--data-dir x is not a folder. Use --model, --resume or another --out."
    with pytest.raises(UserError) as python:
        in_python(refuse)("x")
    assert str(python.value) == "data_dir=x is not a folder. Use model=, resume=True or another out=."
    with pytest.raises(UserError, match=r"^--data-dir x"):  # after a call from Python, too
        refuse("x")


def test_what_a_user_wrote_stays_as_it_is() -> None:
    with pytest.raises(UserError, match=r"^data_dir=a --model of that width is not a folder"):
        in_python(refuse)()


def test_folders_of_runs_speak_python_too(tmp_path: Path) -> None:
    """Words that somebody else wrote stay as they are."""
    file = tmp_path / "of --out and --resume"
    file.write_text("")
    with pytest.raises(UserError) as python:
        protofed.run(protofed.Experiment.load("demo"), file)
    assert str(python.value) == f"out={file} is a file. Name a folder."
    with pytest.raises(UserError) as shell:
        RunFolder(file).check(protofed.Experiment.load("demo"), resume=False)
    assert str(shell.value) == f"--out {file} is a file. Name a folder."


def test_an_error_keeps_its_kind() -> None:
    class Narrow(UserError):
        pass

    def raising() -> None:
        raise Narrow("no")

    with pytest.raises(Narrow):
        in_python(raising)()


def test_names_with_commas_are_told_apart() -> None:
    assert did_you_mean("q", ["b", "a, lam=4"]) == "Known: 'a, lam=4', b."
