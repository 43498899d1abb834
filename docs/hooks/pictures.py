"""Pictures of the concepts become part of the page, so that they take its colours, light or dark."""

import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1]
IMAGE = re.compile(r'<img alt="([^"]*)" src="(?:\.\./)*(images/concepts/[a-z-]+\.svg)"\s*/?>')


def on_page_content(content: str, **_: Any) -> str:
    return IMAGE.sub(lambda found: _inline(found[1], FOLDER / found[2]), content)


def _inline(alt: str, path: Path) -> str:
    """The picture or, if there is one for narrow screens, both; site.css shows the one that fits."""
    narrow = path.with_stem(f"{path.stem}-narrow")
    if not narrow.is_file():
        return _figure(alt, path)
    return _figure(alt, path, " for-wide") + _figure(alt, narrow, " for-narrow")


def _figure(alt: str, path: Path, kind: str = "") -> str:
    drawn = path.read_text(encoding="utf-8").partition("?>")[2].strip() or path.read_text(encoding="utf-8")
    return f'<span class="drawing{kind}" role="img" aria-label="{alt}">{drawn}</span>'
