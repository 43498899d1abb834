"""Draws the README's picture: its example is run, and what it prints becomes a terminal recording.

python tools/record.py     # writes docs/images/first.svg, and the README's block of output
"""

import contextlib
import io
import os
import re
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = re.compile(r"```python\n(?P<code>.*?)```\n\n```text\n(?P<output>.*?)```", re.DOTALL)
STEP = 0.6  # seconds from one line to the next
# Without rich's web fonts: a page of ours asks no other machine for anything.
FORMAT = """<svg class="rich-terminal" width="{width}" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main() -> None:
    """Run the example and write both."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = EXAMPLE.search(readme)
    assert found, "the README has no example followed by its output"
    output = printed(found["code"])
    start, end = found.span("output")
    (ROOT / "README.md").write_text(readme[:start] + output + readme[end:], encoding="utf-8")
    (ROOT / "docs" / "images" / "first.svg").write_text(drawn(output), encoding="utf-8")


def printed(code: str) -> str:
    """What a program writes to its standard output, run in an empty folder."""
    here, said = Path.cwd(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said):
        os.chdir(folder)
        try:
            exec(compile(code, "first.py", "exec"), {"__name__": "__main__"})
        finally:
            os.chdir(here)
    return said.getvalue()


def drawn(output: str) -> str:
    """A terminal in which the lines appear one after another; where nothing moves, all of them are there."""
    console = Console(record=True, width=56, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "green"), "python first.py"))
    for line in output.splitlines():
        text = Text(line)
        text.highlight_regex(r"together +[\d.]+%", "bold green")
        text.highlight_regex("━+", "green")
        console.print(text)
    svg = console.export_svg(title="ten sites, twenty images each", code_format=FORMAT, unique_id="pf")
    rows = range(1, len(output.splitlines()) + 1)
    steps = (f'text[clip-path="url(#pf-line-{row})"] {{ animation: pf 0.2s {STEP * row:.1f}s both; }}' for row in rows)
    moving = "\n".join(["@keyframes pf { from { opacity: 0; } }", *steps])
    moving = f"@media (prefers-reduced-motion: no-preference) {{\n{moving}\n}}\n"
    return re.sub(r"[ \t]+$", "", svg.replace("</style>", moving + "</style>"), flags=re.MULTILINE)


if __name__ == "__main__":
    main()
