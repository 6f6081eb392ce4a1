"""The planted bugs: each is one exact replacement, the fault kind it stands for, and its tests.

A mutant is here because a system of this kind really had such a bug, or because a guard has no
other proof of being needed. `tools/mutants.py` runs them; a unit test sees that each still applies.
"""

from __future__ import annotations

from dataclasses import dataclass

CACHE = "tests/test_faults_cache.py"
SNAPSHOTS = "tests/test_faults_snapshots.py"
TREE = "tests/unit/radix/test_tree.py"
POOL = "tests/unit/memory/test_block_pool.py"
KEY = "tests/unit/radix/test_key.py"
POLICY = "tests/unit/radix/test_policy.py"
DEMOTED = "tests/unit/cache/test_demotion.py"
PROMOTED = "tests/unit/cache/test_promotion.py"
FOUND = "tests/unit/cache/test_stored.py"
TIERED = "tests/unit/cache/test_tiering.py"
LOSSY = "tests/unit/radix/test_lossy.py"
LOSSY_DEVICE = "tests/differential/test_lossy_device.py"
LOSSY_TIERS = "tests/differential/test_lossy_tiers.py"
WORLDS = "tests/sim/test_laws.py::test_a_few_worlds_keep_every_law"


@dataclass(frozen=True)
class Mutant:
    """Replace `old`, which occurs once in `file`, by `new`: one of `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MATCH, TREE_PY, NEED = "radix/match.py", "radix/tree.py", "radix/need.py"
TRAILING, SEGMENT = "radix/trailing.py", "radix/segment.py"
PREFIX, SNAP = "runtime/cache/prefix_cache.py", "runtime/cache/snapshots.py"
BLOCKS, RECOVERY = "runtime/cache/blocks.py", "runtime/cache/recovery.py"
SCHEDULER, CORE = "runtime/scheduler/scheduler.py", "runtime/engine/core.py"
POOL_PY = "runtime/memory/block_pool.py"
COPIES, STORED = "runtime/tiers/copies.py", "runtime/cache/stored.py"
DEMOTION, PROMOTION = "runtime/cache/demotion.py", "runtime/cache/promotion.py"
TIERING, LASTING = "runtime/cache/tiering.py", "radix/lasting.py"

MEETING, PROBE = "runtime/cache/meeting.py", "runtime/cache/probe.py"
MET, PROBED = "tests/unit/cache/test_meeting.py", "tests/unit/cache/test_probe.py"
WITHDRAWN = "tests/unit/tiers/test_withdrawal.py"
STACK, STACKED = "kernels/layer_stack.py", "tests/differential/test_layer_stack.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "f21 a load keeps pages that were withdrawn after they had arrived",
        TIERING,
        "        self.promotions.distrust(keys)\n",
        "",
        (WITHDRAWN,),
    ),
    Mutant(
        "f21 a meeting keeps pages that were withdrawn after they had arrived",
        TIERING,
        "        self.meetings.distrust(keys)\n",
        "",
        (MET,),
    ),
    Mutant(
        "f21 a load that ends takes withdrawn pages for good",
        PROMOTION,
        "is_good = page.key not in self._tiers.withdrawals",
        "is_good = True",
        (WITHDRAWN, PROMOTED),
    ),
    Mutant(
        "withdrawn pages are found while they are being destroyed",
        "runtime/tiers/tiers.py",
        "enumerate(addresses) if address.key not in gone]",
        "enumerate(addresses) if gone is not None]",
        (WITHDRAWN,),
    ),
    Mutant(
        "f2 a meeting takes a batch for whole that is not",
        MEETING,
        "return self.is_done and all(page.arrived for page in self.pages)",
        "return self.is_done",
        (MET,),
    ),
    Mutant(
        "a meeting hands over before computing has reached what was loaded",
        MEETING,
        "ready is not None and ready <= num_pages < self.end",
        "ready is not None and num_pages < self.end",
        (MET,),
    ),
    Mutant(
        "f32 a meeting given up frees blocks that are still written to",
        MEETING,
        "            if not batch.waiting_for:\n                for page in batch.pages:",
        "            if batch.waiting_for is not None:\n                for page in batch.pages:",
        (MET,),
    ),
    Mutant(
        "the end of a run is taken for one page further than was answered",
        PROBE,
        "lo = pages[gap - 1] + 1 if gap else lo",
        "lo = pages[gap - 1] + 2 if gap else lo",
        (PROBED,),
    ),
    Mutant(
        "a prompt that is being asked about waits for ever",
        PROBE,
        "seconds >= PATIENCE_S or self._spent_s + seconds >= MAX_ASKING_S",
        "seconds < 0",
        (PROBED,),
    ),
    Mutant(
        "a remote store that hangs is waited for",
        "runtime/tiers/lanes.py",
        "self._remote.wait(transfer, self._left_s(ends_s)):\n                self._remote.cancel",
        "self._remote.wait(transfer):\n                self._remote.cancel",
        ("tests/unit/tiers/test_lanes.py",),
    ),
    Mutant(
        "pages are pushed out of a small host before they are on disk",
        "runtime/cache/host_room.py",
        "            if not goes and room[page.group] > 0:",
        "            if not goes:",
        (DEMOTED,),
    ),
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
        (KEY,),
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
        "f22 digests are not compared after a load",
        COPIES,
        "            if is_same:\n",
        "            if is_same or len(sums):\n",
        (f"{PROMOTED}::test_a_damaged_page_is_not_used_and_leaves_its_tier",),
    ),
    Mutant(
        "f21 a damaged page stays in its tier",
        COPIES,
        "                store.report_corrupt(pages[i].handle)\n",
        "",
        (f"{PROMOTED}::test_a_damaged_page_is_not_used_and_leaves_its_tier",),
    ),
    Mutant(
        "f21 a damaged block is copied out",
        COPIES,
        "if page.expected is not None and not",
        "if page.expected is None and not",
        (f"{DEMOTED}::test_a_damaged_block_is_not_copied_out_where_checksums_are_kept",),
    ),
    Mutant(
        "f32 a block is given away while it is copied",
        POOL_PY,
        "pinned = self._pins[blocks] > 0\n        if pinned.any()",
        "pinned = self._pins[blocks] < 0\n        if pinned.any()",
        (f"{DEMOTED}::test_a_block_evicted_while_it_is_copied_is_not_given_away",),
    ),
    Mutant(
        "f12 a block that was freed during its copy counts as copied",
        DEMOTION,
        "if self._pools[page.group].generations[page.block] == generation:",
        "if generation >= 0:",
        (f"{DEMOTED}::test_a_block_that_was_given_away_during_its_copy_has_no_copy",),
    ),
    Mutant(
        "f15 pages of a long path are stored under others' names",
        DEMOTION,
        "self._stored.page_address(names, group, start + i))",
        "self._stored.page_address(names, group, i))",
        (f"{DEMOTED}::test_a_long_path_is_copied_in_parts_under_the_right_names",),
    ),
    Mutant(
        "window pages that nobody resumes from are copied",
        LASTING,
        "        good &= kept\n",
        "",
        ("tests/unit/radix/test_lasting.py", DEMOTED),
    ),
    Mutant(
        "f8 a load does not lease the prefix it continues",
        PROMOTION,
        "lease = self._tree.lease(match, boundary * size, range(self._schema.num_groups))",
        "lease = self._tree.lease(match, 0, range(self._schema.num_groups))",
        (f"{PROMOTED}::test_the_prefix_that_a_load_continues_stays_meanwhile",),
    ),
    Mutant(
        "f14 a snapshot comes back without its history",
        PROMOTION,
        "if page.page > lease.num_published_pages:",
        "if page.page < 0:",
        (f"{PROMOTED}::test_a_snapshot_comes_back_only_with_the_history_below_it",),
    ),
    Mutant(
        "a dropped page counts as copied",
        TIERING,
        "                self.mirror.forget(dropped.key)",
        "                pass",
        (f"{DEMOTED}::test_a_page_that_its_tier_dropped_is_copied_again",),
    ),
    Mutant(
        "f23 marks outlive the weights",
        TIERING,
        "        self.mirror.clear()\n        self.stored.forget_names()",
        "        self.stored.forget_names()",
        (f"{TIERED}::test_other_weights_find_nothing_and_mark_nothing",),
    ),
    Mutant(
        "f35 names outlive the weights",
        STORED,
        "        self._remembered.clear()",
        "        pass",
        (f"{FOUND}::test_names_differ_by_whatever_decides_the_bytes",),
    ),
    Mutant(
        "f33 the salt is left out of a page's name",
        "runtime/tiers/page.py",
        "root = blake2b(namespace.key,",
        "root = blake2b(namespace.key[:0],",
        (f"{FOUND}::test_another_salt_finds_nothing",),
    ),
    Mutant(
        "f2 copies beyond a gap are offered",
        STORED,
        "                self._cut(end)\n",
        "",
        (f"{FOUND}::test_history_counts_up_to_the_first_gap_of_any_group",),
    ),
    Mutant(
        "f24 an index is found without its entries",
        "runtime/tiers/tiers.py",
        "        if not address.base:\n            return True",
        "        if store is not None:\n            return True",
        (f"{FOUND}::test_an_index_whose_entries_are_on_the_device_alone_is_not_found",),
    ),
    Mutant(
        "what is evicted is loaded for ever",
        "runtime/scheduler/loading.py",
        "or request.num_loads >= MAX_LOADS:",
        "or request.num_loads < 0:",
        ("tests/unit/scheduler/test_loading.py",),
    ),
    Mutant(
        "lossy: state that may be approximate has the layout of exact state",
        "radix/lossy.py",
        "layout_id=lossy_layout(group.layout_id, kind),",
        "layout_id=group.layout_id,",
        (LOSSY,),
    ),
    Mutant(
        "lossy: nobody asks for the dequantiser",
        "radix/validation.py",
        "({dequantiser(spec.lossy)} if spec.lossy else set())",
        "set()",
        (LOSSY,),
    ),
    Mutant(
        "lossy: a copy's digests are those of the block it was made of",
        COPIES,
        "landing = self._landing(group, rows, digests)",
        "landing = digests",
        (LOSSY_DEVICE,),
    ),
    Mutant(
        "lossy: a block is compared with what its copy reads as",
        COPIES,
        "np.array_equal(page.expected, digests[i])",
        "np.array_equal(page.expected, landing[i])",
        (LOSSY_DEVICE,),
    ),
    Mutant(
        "lossy: numbers are cut off instead of rounded",
        "runtime/tiers/quantise.py",
        "values.round_().clamp_(-top, top).to(torch.int8)",
        "values.clamp_(-top, top).to(torch.int8)",
        ("tests/unit/kernels/test_quantised.py",),
    ),
    Mutant(
        "lossy: the exact share with everybody",
        PREFIX,
        "apart = options.exact and self._blocks.lineage.is_kept",
        "apart = False",
        (LOSSY_TIERS,),
    ),
    Mutant(
        "lossy: what is computed from lossy copies looks exact",
        "runtime/cache/lineage.py",
        "self.mark(group, sequence.owned(group))",
        "del group",
        (LOSSY_TIERS,),
    ),
    Mutant(
        "lossy: what comes back looks exact",
        PROMOTION,
        "self._blocks.lineage.mark(group, promotion.blocks(group))",
        "del group",
        (LOSSY_TIERS,),
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
