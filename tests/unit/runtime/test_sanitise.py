"""What strangers wrote is shown short, and is refused by what is wrong with it."""

from __future__ import annotations

import pytest

from featcal_cli.runtime.sanitise import list_some


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ([], ""),
        (["a"], "a"),
        (["a", "b"], "a, b"),
        (list("abcde"), "a, b, c, d, e"),
        (list("abcdefg"), "a, b, c, d, e and 2 more"),
        ([f"c{number}" for number in range(100_000)], "c0, c1, c2, c3, c4 and 99,995 more"),
    ],
)
def test_of_a_list_from_outside_five_are_shown_and_how_many_more_there_are(names: list[str], shown: str) -> None:
    assert list_some(names) == shown


def test_every_name_of_a_list_is_short_and_inert() -> None:
    shown = list_some(["\x1b[31mred", "x" * 10_000])
    assert "\x1b" not in shown and len(shown) < 120
    assert list_some(["a", "b", "c"], last=" and ") == "a, b and c"
