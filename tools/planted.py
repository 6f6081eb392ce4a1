"""The planted bugs: each is one exact replacement, the fault kind it stands for, and its tests.

A mutant is here because a system of this kind really had such a bug, or because a guard has no
other proof of being needed. `tools/mutants.py` runs them; a unit test sees that each still applies.
Those of slower tiers are in `planted_tiers`.
"""

from __future__ import annotations

from mutant import Mutant

CACHE = "tests/test_faults_cache.py"
SNAPSHOTS = "tests/test_faults_snapshots.py"
TREE = "tests/unit/radix/test_tree.py"
POOL = "tests/unit/memory/test_block_pool.py"
KEY = "tests/unit/radix/test_key.py"
POLICY = "tests/unit/radix/test_policy.py"
DEMOTED = "tests/unit/cache/test_demotion.py"
WORLDS = "tests/sim/test_laws.py::test_a_few_worlds_keep_every_law"
MATCH = "radix/match.py"
TREE_PY = "radix/tree.py"
NEED = "radix/need.py"
TRAILING = "radix/trailing.py"
SEGMENT = "radix/segment.py"
PREFIX = "runtime/cache/prefix_cache.py"
SNAP = "runtime/cache/snapshots.py"
BLOCKS = "runtime/cache/blocks.py"
RECOVERY = "runtime/cache/recovery.py"
SCHEDULER = "runtime/scheduler/scheduler.py"
CORE = "runtime/engine/core.py"
POOL_PY = "runtime/memory/block_pool.py"
STACK = "kernels/layer_stack.py"
STACKED = "tests/differential/test_layer_stack.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "f21 copies of what was computed from damaged state stay in the tiers",
        PREFIX,
        "            self.tiering.withdraw(match, sequence.began_from)",
        "            del match",
        ("tests/unit/tiers/test_withdrawal.py",),
    ),
    Mutant(
        "f1 generations are not compared",
        "radix/validation.py",
        'self._fail(moved, Condition.GENERATION, "the block was given away since")',
        "del moved",
        (f"{CACHE}::test_f1_any_unreadable_block_of_any_group_costs_recomputing_at_most",),
    ),
    Mutant(
        "f1 a whole hit is believed without a look at its blocks",
        "radix/validation.py",
        "    return found == written",
        "    return len(found) == len(written)",
        (f"{CACHE}::test_f1_any_unreadable_block_of_any_group_costs_recomputing_at_most",),
    ),
    Mutant(
        "f1 page tables take what the pool says now",
        RECOVERY,
        "sequence.generations[g][lo:hi] = held[GENERATION]",
        "sequence.generations[g][lo:hi] = self._pools[g].generations[held[BLOCK]]",
        ("tests/sim/test_leases.py",),
    ),
    Mutant(
        "f2 history may have gaps",
        MATCH,
        "running = np.logical_and.accumulate(good)",
        "running = good",
        (TREE,),
    ),
    Mutant(
        "f2 the last group decides",
        MATCH,
        "both &= self.resumable(group, after_load)",
        "both = self.resumable(group, after_load)",
        (TREE,),
    ),
    Mutant(
        "f3 a snapshot is taken before the step",
        SNAP,
        "self._copies.after(g, sequence.working[g], block)",
        "self._copies.before(g, sequence.working[g], block)",
        (f"{SNAPSHOTS}::test_f3_a_snapshot_at_p_is_a_cold_runs_state_at_exactly_p",),
    ),
    Mutant(
        "f3 the end is registered one page early",
        SNAP,
        "if page != sequence.num_published or not position or sequence.standing is not None:",
        "if not position or sequence.standing is not None:",
        (WORLDS, SNAPSHOTS),
    ),
    Mutant(
        "f6 kept pages go before transient ones",
        TRAILING,
        "            if order:\n                pins = next(iter(order))",
        "            if order and not retained:\n                pins = next(iter(order))",
        (f"{CACHE}::test_f6_a_long_requests_window_pages_do_not_push_out_kept_ones", TREE),
    ),
    Mutant(
        "a node bared by eviction is never evicted",
        "radix/topology.py",
        "        if not parent.children and parent in self.recency:",
        "        if not parent.children and parent in self.leaves:",
        (POLICY, TREE),
    ),
    Mutant(
        "a moved item keeps its first place",
        "radix/order.py",
        "        if self._scores.get(item) == score:\n            return",
        "        if item in self._scores:\n            return",
        ("tests/unit/radix/test_order.py",),
    ),
    Mutant(
        "uses do not count",
        "radix/policy.py",
        "log(max(node.hits, 1) / sqrt(",
        "log(1 / sqrt(",
        (POLICY,),
    ),
    Mutant(
        "f7 no branch point is seen",
        MATCH,
        "return history if history > self.reuse_position() else None",
        "return None",
        (TREE,),
    ),
    Mutant(
        "f8 an old match is leased as it is",
        TREE_PY,
        "if match.version != self.topology.version:",
        "if match is None:",
        (TREE, CACHE),
    ),
    Mutant(
        "f8 a stale match is not noticed",
        TREE_PY,
        "        if not same:\n            raise StaleMatchError",
        "        if match is None:\n            raise StaleMatchError",
        (TREE, CACHE),
    ),
    Mutant(
        "f9 no limbo",
        POOL_PY,
        "        if self._open_epochs:\n            self._state[blocks] = LIMBO",
        "        if len(blocks) < 0:\n            self._state[blocks] = LIMBO",
        (POOL,),
    ),
    Mutant(
        "f9 limbo is emptied by any epoch",
        POOL_PY,
        "(oldest is None or self._limbo[0][0] < oldest)",
        "(oldest is None or self._limbo[0][0] >= 0)",
        (POOL,),
    ),
    Mutant(
        "a freed block keeps its generation",
        POOL_PY,
        "self.generations[blocks] += 1",
        "self.generations[blocks] += 0",
        (POOL,),
    ),
    Mutant(
        "f11 a window is one token too short",
        NEED,
        "return max(0, position - spec.window + 1)",
        "return max(0, position - spec.window + 2)",
        (WORLDS, "tests/unit/radix/test_need.py"),
    ),
    Mutant(
        "f12 a failed row is kept",
        CORE,
        "code=code, http_status=status)\n"
        "            self._finish(request, reason, keep_state=False)\n            return",
        "code=code, http_status=status)\n"
        "            self.scheduler.advance(request, row)\n"
        "            self._finish(request, reason, keep_state=True)\n            return",
        (f"{CACHE}::test_f12_state_of_a_step_that_failed_is_never_found",),
    ),
    Mutant(
        "f17 any snapshot serves any boundary",
        MATCH,
        "out = ~snapshot_boundaries(spec, self.logical_pages, size)",
        "out = ~snapshot_boundaries(spec, self.logical_pages, size) | bool(self.snapshots)",
        (f"{SNAPSHOTS}::test_f17_a_snapshot_serves_its_exact_position_and_no_other",),
    ),
    Mutant(
        "f18 a partly filled page is not copied",
        SNAP,
        "                self._copies.before(g, held.block, block)",
        "                self._copies.before(g, block, block)",
        (SNAPSHOTS,),
    ),
    Mutant(
        "f19 pages are published before they are computed",
        SCHEDULER,
        "        publishable = row.end\n",
        "        publishable = request.num_tokens\n",
        (f"{CACHE}::test_f19_nothing_is_found_before_its_computation_was_confirmed", WORLDS),
    ),
    Mutant(
        "f23 the stamp leaves the weights' epoch out",
        "radix/stamp.py",
        "                    weights_epoch,\n",
        "                    0,\n",
        (WORLDS,),
    ),
    Mutant(
        "f24 an index does not look at its entries",
        MATCH,
        "good = good & (self._rows(group, DEPENDENCY) == source)",
        "good = good & (source == source)",
        (f"{CACHE}::test_f24_an_index_over_replaced_entries_is_not_resident",),
    ),
    Mutant(
        "f25 an over-long prompt is taken",
        CORE,
        "if len(ids) >= self.max_sequence_len:",
        "if len(ids) < 0:",
        (f"{CACHE}::test_f25_every_request_that_cannot_run_is_answered_once",),
    ),
    Mutant(
        "f26 a lease protects the whole window group",
        NEED,
        "    return sinks, lo, num_pages",
        "    return 0, 0, num_pages",
        (f"{CACHE}::test_f26_a_lease_takes_only_the_window_it_needs_out_of_eviction",),
    ),
    Mutant(
        "f29 the snapshot is not restored",
        SNAP,
        "                self._copies.before(g, held.block, sequence.working[g])\n",
        "                pass\n",
        (f"{SNAPSHOTS}::test_f29_every_suffix_length_after_a_hit_equals_a_cold_run",),
    ),
    Mutant(
        "f33 namespaces are concatenated",
        "radix/key.py",
        'size.to_bytes(8, "little") + salt + adapter',
        "salt + adapter",
        (f"{KEY}::test_f33_namespaces_never_alias",),
    ),
    Mutant(
        "f34 the first group is evicted from",
        BLOCKS,
        "self._tree.evict(group, missing)",
        "self._tree.evict(0, missing)",
        (f"{CACHE}::test_f34_the_short_pool_is_named_and_evicted_from",),
    ),
    Mutant(
        "f35 any stamp is valid",
        SEGMENT,
        "good: Bool = self.table[STAMP] == stamp",
        "good: Bool = self.table[STAMP] >= 0",
        (TREE, f"{CACHE}::test_f35_a_difference_in_any_part_of_the_stamp_is_a_miss"),
    ),
    Mutant(
        "a half reserved page is not given back",
        BLOCKS,
        "                self.pools[group].free(blocks)\n            raise",
        "                pass\n            raise",
        (WORLDS,),
    ),
    Mutant(
        "a window's pages that the tree owns are freed",
        PREFIX,
        "own_from = max(gone_from, sequence.num_published)",
        "own_from = gone_from",
        (f"{CACHE}::test_f11_every_window_group_keeps_its_own_window",),
    ),
    Mutant(
        "sink pages leave with the window",
        PREFIX,
        "gone_from = max(old, sequence.sink_pages[g])",
        "gone_from = old",
        (f"{SNAPSHOTS}::test_f29_every_suffix_length_after_a_hit_equals_a_cold_run", WORLDS),
    ),
    Mutant(
        "working blocks are not made ready after replays",
        PREFIX,
        "sequence.standing = Standing(resume, self._snapshots.needed_at(resume), made)",
        "sequence.standing = None",
        (f"{CACHE}::test_f2_whatever_groups_lost_what_pages_the_output_is_a_cold_runs",),
    ),
    Mutant(
        "a rebuilt page loses its deeper layers",
        RECOVERY,
        "            self._copies.before(group, old, block)  # keep the deeper layers",
        "            pass",
        ("tests/sim/test_audit.py", WORLDS),
    ),
    Mutant(
        "the worker is not told that a request ended",
        CORE,
        "        self.worker.release(request.rid)\n",
        "",
        (WORLDS,),
    ),
    Mutant(
        "the last token's state is reused",
        "runtime/scheduler/request.py",
        "limit = self.num_tokens - 1",
        "limit = self.num_tokens",
        (f"{CACHE}::test_f1_any_unreadable_block_of_any_group_costs_recomputing_at_most", WORLDS),
    ),
    Mutant(
        "only the end of a match is audited",
        PREFIX,
        "if passed and position % granularity:",
        "if position < 0:",
        ("tests/sim/test_laws.py::test_worlds_that_once_broke_a_law",),
    ),
    Mutant(
        "f32 a block is given away while it is copied",
        POOL_PY,
        "pinned = self._pins[blocks] > 0\n        if pinned.any()",
        "pinned = self._pins[blocks] < 0\n        if pinned.any()",
        (f"{DEMOTED}::test_a_block_evicted_while_it_is_copied_is_not_given_away",),
    ),
    Mutant(
        "stack: pools that have moved are not noticed",
        STACK,
        "if pools is not self._pools:",
        "if self._pools is None:",
        (STACKED,),
    ),
    Mutant(
        "stack: a layer that shares K/V writes them again",
        STACK,
        "place.group, place.writes = group, writes",
        "place.group, place.writes = group, True",
        (STACKED,),
    ),
    Mutant(
        "stack: the final norm after any number of layers",
        STACK,
        "self._final_norm if num_layers == len(self._layers) else None",
        "self._final_norm",
        (STACKED,),
    ),
)
