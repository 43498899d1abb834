"""The threat model names tests that there are, and SECURITY.md leads to it."""

import re

from checkout import ROOT

NAMED = re.compile(r"`(test_\w+)`")


def there_are() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        found |= set(re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.M))
    return found


def test_every_claim_names_a_test_that_there_is() -> None:
    text = (ROOT / "docs" / "threats.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    tables = text.count("| it tries to | what happens | test |")
    claims = [row for row in rows if NAMED.search(row)]
    assert tables == 6
    assert len(claims) > 30
    without = [row for row in rows if row.count("|") == 4 and not NAMED.search(row) and "| test |" not in row]
    assert all(row.split("|")[1].strip() in text.partition("## A malicious client")[0] for row in without), without
    assert set(NAMED.findall(text)) <= there_are()


def test_that_search_notices_a_test_that_is_gone() -> None:
    assert "test_every_claim_names_a_test_that_there_is" in there_are()
    assert "test_that_there_never_was" not in there_are()


def test_security_md_leads_to_the_threat_model() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for link in re.findall(r"\]\((\S+?)\)", text):
        assert (ROOT / link).is_file(), link
    assert "docs/threats.md" in text
