"""Skips a file of tests that needs a package which is not installed, without importing the package: each process of the
tests reads every file, and some packages take seconds."""

import importlib.util

import pytest


def needs(package: str, install: str) -> None:
    """Call it at the top of a file; `install` is the command that installs the package."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: {install}", allow_module_level=True)
