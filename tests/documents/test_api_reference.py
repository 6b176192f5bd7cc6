"""docs/api.md is what tools/api_reference.py makes of the docstrings."""

import re

from tools import api_reference


def test_the_page_is_up_to_date() -> None:
    text = api_reference.render()
    assert api_reference.PAGE.read_text(encoding="utf-8") == text, "out of date; run python tools/api_reference.py"


def test_every_public_name_is_described_once() -> None:
    headings = re.findall(r"^### (tq\.[\w.]+)$", api_reference.PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(headings) == sorted(api_reference.public_names())


def test_every_public_name_has_a_docstring() -> None:
    bare = [name for name, found in api_reference.public_names().items() if not (found.__doc__ or "").strip()]
    assert not bare


def test_a_docstring_becomes_lists() -> None:
    text = "Does it.\n\nArgs:\n    first: What comes\n        first.\n    second: Then.\n\nReturns:\n    That.\n"
    assert api_reference.render_docstring(text) == (
        "Does it.\n\n*Args*\n\n- `first`: What comes\n  first.\n- `second`: Then.\n\n*Returns*\n\nThat."
    )


def test_a_name_of_an_unknown_module_still_has_a_place() -> None:
    def stranger(count: int = 3, *, names: "list[str] | None" = None) -> int:
        """Counts."""
        return count

    stranger.__module__ = "torchquorum.elsewhere"
    assert api_reference.theme_of("tq.stranger", stranger) == api_reference.MORE
    page = api_reference.describe("tq.stranger", stranger)
    assert "stranger(count: int = 3, *, names: list[str] | None = None) -> int" in page
    assert "Counts." in page
