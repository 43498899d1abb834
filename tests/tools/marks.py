"""Which marker a test must have for what it starts; `make quick` leaves tests with one of these out."""

import re
from typing import Any

MARKS = ("namespace", "slow", "ray", "browser", "docs")  # what takes longest comes first
PROCESSES = {"namespace", "slow", "ray", "browser"}
STARTED = {
    r"\bnetns\b": {"namespace"},
    r"\bchromedriver\b": {"browser"},
    r"\bgcs_server\b|\bray\.scripts\b": {"ray"},
    r"-m mkdocs\b": {"docs"},
    r"-m protofed\b|\bcli\.main\(|\bimport .*\brun;|protofed\.sweep\.worker\b|\bflower-superlink\b": set(MARKS),
}
now: set[str] | None = None  # the markers of the test that is running


def check(event: str, values: tuple[Any, ...]) -> None:
    """An audit hook: no test starts a process that its markers do not announce."""
    if event != "subprocess.Popen" or now is None:
        return
    words = values[1]
    command = words if isinstance(words, str) else " ".join(str(word) for word in words)
    for pattern, enough in STARTED.items():
        if re.search(pattern, command) and not enough & now:
            wanted = " or ".join(mark for mark in MARKS if mark in enough)
            raise AssertionError(f"A test that starts {command[:100]!r} needs the marker {wanted}.")
