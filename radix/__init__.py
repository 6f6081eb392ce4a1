"""Decisions about cached state: tree, groups, validation, planning. Standard library and numpy.

The public names of the tree are exported here; README.md shows how they fit together.
"""

from statewise.radix.cost import CostModel, TierCost
from statewise.radix.forms import Cause, EventSink, Form, FormError, Transition
from statewise.radix.key import Namespace, TokenKey
from statewise.radix.lease import Lease
from statewise.radix.match import Match, Snapshot
from statewise.radix.observe import CostObserver
from statewise.radix.plan import Level, Load, Recompute, RecoveryPlan, Replay, Reuse
from statewise.radix.planner import Budget, plan
from statewise.radix.policy import (
    CheckpointPolicy,
    EvictionPolicy,
    Prefill,
    checkpoint_policy,
    eviction_policy,
)
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
from statewise.radix.validation import (
    ChainLayer,
    Condition,
    GroupEnv,
    ValidationEnv,
    Verdict,
    validate,
)

__all__ = [
    "Budget",
    "CacheSchema",
    "Cause",
    "ChainLayer",
    "CheckpointPolicy",
    "Condition",
    "CostModel",
    "CostObserver",
    "Duplicates",
    "EventSink",
    "EvictionPolicy",
    "Form",
    "FormError",
    "Freed",
    "GroupEnv",
    "GroupKind",
    "Lease",
    "Level",
    "Load",
    "Match",
    "Namespace",
    "Prefill",
    "Published",
    "RadixTree",
    "Recompute",
    "RecoveryPlan",
    "Replay",
    "Reuse",
    "SlowBlock",
    "Snapshot",
    "StaleMatchError",
    "Stamp",
    "StampTable",
    "StateGroupSpec",
    "Tier",
    "TierCost",
    "TokenKey",
    "Transition",
    "ValidationEnv",
    "Verdict",
    "Written",
    "checkpoint_policy",
    "eviction_policy",
    "plan",
    "validate",
]
