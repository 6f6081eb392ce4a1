"""What a model declares about its cached state: groups as data.

Nothing else in the tree, the cache or the scheduler knows a model's name. A *state group* is a set
of layers that share kind, geometry, dtype and lifecycle; a `CacheSchema` is all groups of one
model under one page size.

This module does not know where blocks live, which tier they are on, or who holds them.

    kind         holds                                  resume at position p needs
    FULL         K/V (or latent) of every token         every page below p
    COMPRESSED   one entry per `ratio` tokens           every page below p
    INDEX        index keys over `depends_on`           every page below p
    WINDOW       K/V of the last `window` tokens        pages covering p-window+1 .. p-1
    CHUNKED      K/V of the current aligned chunk       pages covering window*(p//window) .. p-1
    TAIL         raw projections of the open window     the snapshot taken at p (none if p % ratio
                                                        == 0 and `overlap` == 0)
    RECURRENT    recurrent / convolution state          the snapshot taken at p
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from math import lcm


class GroupKind(enum.Enum):
    """How a group's state depends on the token history."""

    FULL = "full"
    COMPRESSED = "compressed"
    INDEX = "index"
    WINDOW = "window"
    CHUNKED = "chunked"
    TAIL = "tail"
    RECURRENT = "recurrent"

    is_history: bool  # every page below the position is needed
    is_window: bool  # only trailing pages are needed
    is_snapshot: bool  # one block holds the state at exactly one position

    def __init__(self, word: str) -> None:
        self.is_history = word in ("full", "compressed", "index")
        self.is_window = word in ("window", "chunked")
        self.is_snapshot = word in ("tail", "recurrent")


@dataclass(frozen=True)
class StateGroupSpec:
    """One state group of a model.

    `entry_bytes` is the size of one entry of one layer (history and window kinds);
    `snapshot_bytes` the size of one layer's snapshot (snapshot kinds). `layers` are the model
    layers that own state here; `shared_layers` maps a layer that reads another layer's state to
    its owner. `layout_id` names the physical layout (dtype, geometry, K/V order) that the
    attention backend declared; `version` names the attention configuration that wrote the state
    (window, rope, compression function): either one differing means the bytes mean something else.
    `lossy` names how slower tiers quantise the group's pages; empty: they keep every bit (`lossy`).
    """

    name: str
    kind: GroupKind
    layers: tuple[int, ...]
    layout_id: str
    version: str
    entry_bytes: int = 0
    snapshot_bytes: int = 0
    window: int = 0  # tokens; WINDOW and CHUNKED
    ratio: int = 1  # tokens per entry; COMPRESSED, INDEX and TAIL
    overlap: int = 0  # tokens of the previous compression window the next entry needs; TAIL
    sinks: int = 0  # first tokens that never leave a window
    depends_on: str | None = None  # INDEX: the group it routes into
    top_k: int = 0  # entries of that group which a token reads at most; 0: all. INDEX
    shared_layers: tuple[tuple[int, int], ...] = field(default=())
    lossy: str = ""

    def __post_init__(self) -> None:
        """Reject a spec that no position could satisfy."""
        if not self.layers:
            raise ValueError(f"group {self.name!r}: no layers")
        if self.kind.is_window and self.window < 1:
            raise ValueError(f"group {self.name!r}: {self.kind.value} needs window >= 1")
        if self.kind is GroupKind.INDEX and self.depends_on is None:
            raise ValueError(f"group {self.name!r}: an index names the group it depends on")
        if self.ratio < 1:
            raise ValueError(f"group {self.name!r}: ratio {self.ratio} < 1")
        size = self.snapshot_bytes if self.kind.is_snapshot else self.entry_bytes
        if size < 1:
            raise ValueError(f"group {self.name!r}: no byte size for kind {self.kind.value}")

    def entries_per_page(self, page_size: int) -> int:
        """Entries of one layer in one block (1 for a snapshot)."""
        return 1 if self.kind.is_snapshot else page_size // self.ratio

    def block_bytes(self, page_size: int) -> int:
        """Bytes of one block: all layers of the group."""
        if self.kind.is_snapshot:
            return self.snapshot_bytes * len(self.layers)
        return self.entry_bytes * self.entries_per_page(page_size) * len(self.layers)


@dataclass(frozen=True)
class CacheSchema:
    """All state groups of a model, in a fixed order; a group's index is its identity elsewhere."""

    page_size: int  # tokens per page; a multiple of every ratio
    num_layers: int
    groups: tuple[StateGroupSpec, ...]
    model_fingerprint: str  # digest of config and weights

    def __post_init__(self) -> None:
        """Check names, dependencies and that a page holds whole entries of every group."""
        names = [g.name for g in self.groups]
        if len(set(names)) != len(names):
            raise ValueError(f"duplicate group names: {names}")
        ratios = [g.ratio for g in self.groups if g.kind.is_history]
        unit = lcm(1, *ratios)
        if self.page_size < 1 or self.page_size % unit:
            raise ValueError(
                f"page size {self.page_size} is not a multiple of {unit}, "
                "the least common multiple of the compression ratios"
            )
        for g in self.groups:
            if g.depends_on is not None and g.depends_on not in names:
                raise ValueError(f"group {g.name!r} depends on unknown group {g.depends_on!r}")
            if g.top_k and g.depends_on is None:
                raise ValueError(f"group {g.name!r}: only an index chooses top_k entries")
            if any(not 0 <= layer < self.num_layers for layer in g.layers):
                raise ValueError(f"group {g.name!r}: layer outside 0..{self.num_layers - 1}")

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(self.groups)

    def index_of(self, name: str) -> int:
        """Index of the group called `name`; KeyError where there is none."""
        for i, g in enumerate(self.groups):
            if g.name == name:
                return i
        raise KeyError(name)

    def bytes_per_token(self) -> dict[str, float]:
        """Bytes one token adds to each history or window group (for logs and planning)."""
        return {
            g.name: g.block_bytes(self.page_size) / self.page_size
            for g in self.groups
            if not g.kind.is_snapshot
        }
