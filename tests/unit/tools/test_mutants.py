"""Every planted bug still applies: its text occurs exactly once, and its tests exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutants import ALL, Mutant

ROOT = Path(__file__).resolve().parents[3]


def test_there_are_enough_and_their_names_differ() -> None:
    names = [mutant.name for mutant in ALL]
    assert len(set(names)) == len(names) >= 25


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_mutant_applies(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.old != mutant.new
    assert mutant.tests
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).exists(), path
        if name:
            assert f"def {name}(" in (ROOT / path).read_text(), name
