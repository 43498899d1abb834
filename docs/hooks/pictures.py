"""Pictures of the concepts become part of the page, so that they take its colours, light or dark."""

import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1]
IMAGE = re.compile(r'<img alt="([^"]*)" src="(?:\.\./)*(images/concepts/[a-z-]+\.svg)"\s*/?>')


def on_page_content(content: str, **_: Any) -> str:
    return IMAGE.sub(lambda found: _inline(found[1], FOLDER / found[2]), content)


def _inline(alt: str, path: Path) -> str:
    drawn = path.read_text(encoding="utf-8").partition("?>")[2].strip() or path.read_text(encoding="utf-8")
    return f'<span class="drawing" role="img" aria-label="{alt}">{drawn}</span>'
