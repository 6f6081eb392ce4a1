"""Decisions about cached state: tree, groups, validation, planning. Standard library and numpy.

The public names of the tree are exported here; README.md shows how they fit together.
"""

from statewise.radix.key import Namespace, TokenKey
from statewise.radix.lease import Lease
from statewise.radix.match import Match, Snapshot
from statewise.radix.results import (
    Duplicates,
    Freed,
    Published,
    SlowBlock,
    StaleMatchError,
    Written,
)
from statewise.radix.schema import CacheSchema, GroupKind, StateGroupSpec
from statewise.radix.segment import Tier
from statewise.radix.stamp import Stamp, StampTable
from statewise.radix.tree import RadixTree

__all__ = [
    "CacheSchema",
    "Duplicates",
    "Freed",
    "GroupKind",
    "Lease",
    "Match",
    "Namespace",
    "Published",
    "RadixTree",
    "SlowBlock",
    "Snapshot",
    "StaleMatchError",
    "Stamp",
    "StampTable",
    "StateGroupSpec",
    "Tier",
    "TokenKey",
    "Written",
]
