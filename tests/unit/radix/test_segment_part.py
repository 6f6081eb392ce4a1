"""A part of a run with mixed stamps may be uniform: its summary is counted again."""

from __future__ import annotations

import numpy as np

from statewise.radix.segment import MIXED, new_columns, of_table


def test_a_part_of_a_mixed_run_counts_its_own_stamp() -> None:
    blocks = np.arange(4, dtype=np.int32)
    columns = new_columns(blocks, None, 1, 0)
    columns[2, 2:] = 2  # the STAMP row of the last two pages
    whole = of_table(columns)
    assert whole.stamp == MIXED
    assert whole.part(0, 2).stamp == 1
    assert whole.part(2, 4).stamp == 2
    assert whole.part(1, 3).stamp == MIXED
