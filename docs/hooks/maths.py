"""Equations are rendered while the site is built, as MathML, which browsers draw without a script."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
BARS = re.compile(r"<mo>(&#x02016;|&#x0007C;|\\|)</mo>")  # of norms: browsers stretch and lower them before an exponent
BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    content = BLOCK.sub(lambda found: f'<div class="equation">{_mathml(found[1], "block")}</div>', content)
    return INLINE.sub(lambda found: _mathml(found[1], "inline"), content)


def _mathml(latex: str, display: str) -> str:
    text = convert(html.unescape(latex.strip()), display=display)
    if "\\" in html.unescape(text):  # an unknown command is passed through as it is
        raise ValueError(f"latex2mathml does not know something in {latex!r}")
    return BARS.sub(r'<mo stretchy="false">\1</mo>', text)
