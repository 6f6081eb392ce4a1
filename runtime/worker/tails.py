"""Open compression windows: raw rows that wait in a request's working block for their window.

A window of `ratio` tokens is compressed when its last token arrives. Until then its raw rows (what
the layer projects from each token) lie in the TAIL group's working block of the request; where
compression windows overlap, so do the first `halo` numbers of the rows of the window before.

    block      halo of the window before     open window
               slot 0 .. overlap-1           slot 0 .. ratio-2
    position   base-overlap .. base-1        base .. position-1

    base = ratio * (position // ratio)

Slots that hold no token of the prefix are zero, so the block is a function of the prefix alone.
Nothing is read of the block of a row that starts at position 0.

`TailPlan` finds once a step, in index arrays, where each raw row comes from and goes to; each layer
then moves its numbers along these arrays. This module does not compress anything.

Shapes: T packed tokens, N windows completed in the step, M = ratio, w numbers of a raw row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from statewise.runtime.models.base import TailWindows

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class TailRow:
    """One row of a step: tokens at start .. end-1, packed from `first`; its working block."""

    first: int
    start: int
    end: int
    block: int
    is_written: bool


class Moves:
    """Copies of raw rows, collected as (source, target) index arrays."""

    def __init__(self) -> None:
        self._parts: list[tuple[Int64, ...]] = []

    def add(self, *arrays: Int64) -> None:
        """Add copies; all arrays have one length."""
        if len(arrays[0]):
            self._parts.append(arrays)

    def columns(self, width: int) -> tuple[Tensor, ...]:
        """All copies as `width` index tensors."""
        if not self._parts:
            return tuple(torch.empty(0, dtype=torch.int64) for _ in range(width))
        return tuple(torch.from_numpy(np.concatenate(c)) for c in zip(*self._parts, strict=True))


class TailPlan:
    """Where raw rows come from and go to in one step of one TAIL group."""

    def __init__(self, rows: list[TailRow], ratio: int, overlap: int) -> None:
        assert ratio > 1 and 0 <= overlap <= ratio  # noqa: PT018
        self.ratio, self.overlap = ratio, overlap
        self._window_new, self._window_open = Moves(), Moves()
        self._halo_new, self._halo_open, self._halo_kept = Moves(), Moves(), Moves()
        self._open_new, self._open_zero = Moves(), Moves()
        self._kept_new, self._kept_open, self._kept_zero = Moves(), Moves(), Moves()
        starts: list[Int64] = []
        has_previous: list[NDArray[np.bool_]] = []
        done = 0
        for row in rows:
            windows = np.arange(row.start // ratio, row.end // ratio, dtype=np.int64)
            self._complete(row, windows, done)
            starts.append(windows * ratio)
            has_previous.append(windows > 0)
            done += len(windows)
            if row.is_written:
                self._keep(row)
        self.num_windows = done
        self.starts = torch.from_numpy(np.concatenate(starts))
        self.has_previous = torch.from_numpy(np.concatenate(has_previous))
        self._freeze()

    def _complete(self, row: TailRow, windows: Int64, done: int) -> None:
        """Sources of the row's completed windows; `done` windows came before."""
        m, base = self.ratio, row.start - row.start % self.ratio
        places = np.arange(len(windows), dtype=np.int64)[:, None] * m + np.arange(m)
        positions = (places + windows[:1] * m).ravel() if len(windows) else places.ravel()
        targets = (places + done * m).ravel()
        is_new = positions >= row.start
        self._window_new.add(targets[is_new], positions[is_new] - row.start + row.first)
        old = ~is_new
        self._window_open.add(targets[old], *self._at(row, positions[old] - base))
        if self.overlap:
            self._complete_halo(row, windows, done)

    def _complete_halo(self, row: TailRow, windows: Int64, done: int) -> None:
        """Sources of the window before each completed window; none for a row's first one."""
        m, o, base = self.ratio, self.overlap, row.start - row.start % self.ratio
        order = np.arange(len(windows), dtype=np.int64)
        positions = ((windows * m - o)[:, None] + np.arange(o)).ravel()
        targets = ((order + done)[:, None] * o + np.arange(o)).ravel()
        exists = positions >= 0
        positions, targets = positions[exists], targets[exists]
        new, kept = positions >= row.start, positions < base
        opened = ~new & ~kept
        self._halo_new.add(targets[new], positions[new] - row.start + row.first)
        self._halo_open.add(targets[opened], *self._at(row, positions[opened] - base))
        self._halo_kept.add(targets[kept], *self._at(row, positions[kept] - base + o))

    def _keep(self, row: TailRow) -> None:
        """What the row's block must hold after the step, where it differs from before."""
        m, o = self.ratio, self.overlap
        base, new_base = row.start - row.start % m, row.end - row.end % m
        opened = np.arange(max(new_base, row.start), row.end, dtype=np.int64)
        self._open_new.add(*self._at(row, opened - new_base), opened - row.start + row.first)
        if base == new_base and row.start:
            return  # the same window: what it holds already stays
        rest = np.arange(row.end - new_base, m - 1, dtype=np.int64)
        self._open_zero.add(*self._at(row, rest))
        slots = np.arange(o, dtype=np.int64)
        positions = new_base - o + slots
        # A window that became the one before was complete: its rows are new, or were open.
        new, none = positions >= row.start, positions < 0
        was_open = ~new & ~none
        self._kept_new.add(*self._at(row, slots[new]), positions[new] - row.start + row.first)
        self._kept_open.add(
            *self._at(row, slots[was_open]), *self._at(row, positions[was_open] - base)
        )
        self._kept_zero.add(*self._at(row, slots[none]))

    @staticmethod
    def _at(row: TailRow, slots: Int64) -> tuple[Int64, Int64]:
        return np.full(len(slots), row.block, dtype=np.int64), slots

    def _freeze(self) -> None:
        self.window_new = self._window_new.columns(2)
        self.window_open = self._window_open.columns(3)
        self.halo_new = self._halo_new.columns(2)
        self.halo_open = self._halo_open.columns(3)
        self.halo_kept = self._halo_kept.columns(3)
        self.open_new = self._open_new.columns(3)
        self.open_zero = self._open_zero.columns(2)
        self.kept_new = self._kept_new.columns(3)
        self.kept_open = self._kept_open.columns(4)
        self.kept_zero = self._kept_zero.columns(2)

    def exchange(self, pool: Tensor, raw: Tensor, halo_width: int) -> TailWindows:
        """Give out completed windows and keep the rest: pool [B, n] is mutated, raw [T, w] read."""
        width = raw.shape[1]
        count = pool.shape[0]
        halo = pool[:, : self.overlap * halo_width].view(count, self.overlap, halo_width)
        opened = pool[:, self.overlap * halo_width :].view(count, self.ratio - 1, width)
        raw = raw.to(pool.dtype)
        windows = self._gather_windows(raw, opened)
        previous = self._gather_halo(raw, halo, opened, halo_width)
        if self.overlap:  # before the open rows that it takes are overwritten
            _put(halo, self.kept_open[:2], opened[self.kept_open[2:]][:, :halo_width])
            _put(halo, self.kept_new[:2], raw[self.kept_new[2]][:, :halo_width])
            _put(halo, self.kept_zero, None)
        _put(opened, self.open_new[:2], raw[self.open_new[2]])
        _put(opened, self.open_zero, None)
        return TailWindows(self.starts, previous, self.has_previous, windows)

    def _gather_windows(self, raw: Tensor, opened: Tensor) -> Tensor:
        out = raw.new_empty(self.num_windows * self.ratio, raw.shape[1])
        out[self.window_new[0]] = raw[self.window_new[1]]
        if self.window_open[0].numel():
            out[self.window_open[0]] = opened[self.window_open[1:]]
        return out.view(self.num_windows, self.ratio, raw.shape[1])

    def _gather_halo(self, raw: Tensor, halo: Tensor, opened: Tensor, halo_width: int) -> Tensor:
        out = raw.new_zeros(self.num_windows * self.overlap, halo_width)
        if self.overlap:
            out[self.halo_new[0]] = raw[self.halo_new[1]][:, :halo_width]
            if self.halo_open[0].numel():
                out[self.halo_open[0]] = opened[self.halo_open[1:]][:, :halo_width]
            if self.halo_kept[0].numel():
                out[self.halo_kept[0]] = halo[self.halo_kept[1:]]
        return out.view(self.num_windows, self.overlap, halo_width)


def _put(target: Tensor, places: tuple[Tensor, ...], values: Tensor | None) -> None:
    """Set target[places] to values, or to zero."""
    if places[0].numel():
        target[places] = 0 if values is None else values


def plan_tails(
    spans: list[tuple[int, int]],
    blocks: list[int],
    is_written: list[bool],
    ratio: int,
    overlap: int,
) -> TailPlan:
    """Plan rows that compute positions start .. end-1 each, packed one after the other."""
    firsts = np.concatenate([[0], np.cumsum([end - start for start, end in spans])]).tolist()
    rows = [
        TailRow(first, start, end, block, written)
        for (first, _), (start, end), block, written in zip(
            pairwise(firsts), spans, blocks, is_written, strict=True
        )
    ]
    return TailPlan(rows, ratio, overlap)
