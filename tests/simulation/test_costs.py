"""Costs by name and from files, and what is said of files with mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.costs import DEFAULT, NONE, Costs, CostsError, parse_costs


def test_costs_are_named_or_in_a_file(tmp_path: Path) -> None:
    assert (parse_costs("none"), parse_costs("default")) == (NONE, DEFAULT)
    (tmp_path / "own.toml").write_text("start_s = 3\nboundaries = true\n")
    assert parse_costs(str(tmp_path / "own.toml")) == Costs(start_s=3.0, boundaries=True)
    assert DEFAULT.change_s == 35.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("start_s = -1\n", "own.toml: start_s must be at least 0; it may hold message_s, "),
        ("start_s = nan\n", "own.toml: start_s must be at least 0; "),
        ("start_s = 1e7\n", "own.toml: start_s must be at most 1000000; "),
        ("start_s = 'long'\n", "own.toml: start_s must be a number, and is text; "),
        ("boundaries = 1\n", "own.toml: boundaries must be true or false, and is a whole number; "),
        ("begin_s = 1\n", "own.toml: unknown field `begin_s`; leave it out or mend its name; it may hold message_s, "),
        ("start_s = \n", "own.toml is not TOML: "),
    ],
)
def test_a_wrong_file_is_one_sentence_with_field_and_mend(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(CostsError) as wrong:
        parse_costs(str(tmp_path / "own.toml"))
    assert str(wrong.value).startswith(f"{tmp_path}/{words}")
    assert "\n" not in str(wrong.value)
