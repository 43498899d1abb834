"""A real browser for tests, or a skip that says what is missing."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def opened(profile: Path, *flags: str, **logs: str) -> Iterator[Any]:
    """Chromium with a profile of its own; `logs` are kinds of its log and from which level they are kept."""
    selenium = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install 'protofed[dev]'")
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("needs a browser: apt-get install chromium chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS, f"--user-data-dir={profile}", *flags):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"} | logs)
    browser = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    try:
        yield browser
    finally:
        browser.quit()
