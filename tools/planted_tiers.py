"""The bugs planted in slower tiers: stores, copies out and back, lossy copies. See `planted`."""

from __future__ import annotations

from mutant import Mutant

DEMOTED = "tests/unit/cache/test_demotion.py"
PROMOTED = "tests/unit/cache/test_promotion.py"
FOUND = "tests/unit/cache/test_stored.py"
TIERED = "tests/unit/cache/test_tiering.py"
LOSSY = "tests/unit/radix/test_lossy.py"
LOSSY_DEVICE = "tests/differential/test_lossy_device.py"
LOSSY_TIERS = "tests/differential/test_lossy_tiers.py"
PREFIX = "runtime/cache/prefix_cache.py"
COPIES = "runtime/tiers/copies.py"
STORED = "runtime/cache/stored.py"
DEMOTION = "runtime/cache/demotion.py"
PROMOTION = "runtime/cache/promotion.py"
TIERING = "runtime/cache/tiering.py"
LASTING = "radix/lasting.py"
MEETING = "runtime/cache/meeting.py"
PROBE = "runtime/cache/probe.py"
MET = "tests/unit/cache/test_meeting.py"
PROBED = "tests/unit/cache/test_probe.py"
WITHDRAWN = "tests/unit/tiers/test_withdrawal.py"

TIER_MUTANTS: tuple[Mutant, ...] = (
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
        "f21 headers of a native load are not looked at",
        "runtime/tiers/disk_plain.py",
        "good[i] = good[i] and plain.is_header(view[start:end], expected)",
        "good[i] = good[i] and expected is not None",
        ("tests/unit/tiers/test_disk_plain.py",),
    ),
    Mutant(
        "f1 a bad place costs all pages that are read with it",
        "runtime/tiers/disk_read.py",
        "    if len(run) == 1 or not all(map(_is_unreadable, results)):\n",
        "    if run:\n",
        ("tests/unit/tiers/test_disk_faults.py",),
    ),
    Mutant(
        "f20 a writer does not notice that its directory is another's by now",
        "runtime/tiers/files.py",
        "return self._fd >= 0 and os.path.samestat(os.fstat(self._fd), self._path.stat())",
        "return self._fd >= 0",
        ("tests/unit/tiers/test_disk_faults.py",),
    ),
    Mutant(
        "f22 digests of a native load are not compared",
        "runtime/tiers/disk_plain.py",
        "good: list[bool] = (stored == landed).all(axis=1).tolist()",
        "good: list[bool] = [True] * len(stored)",
        ("tests/unit/tiers/test_disk_plain.py",),
    ),
    Mutant(
        "a load that the file's end cut short takes all of its pages for read",
        "kernels/blocks.py",
        "found: Digests = out[: p.num_read]",
        "found: Digests = out[: p.num_records]",
        ("tests/unit/kernels/test_blocks.py", "tests/unit/tiers/test_disk_plain.py"),
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
        "history goes down before what is evicted first",
        DEMOTION,
        "self._copy_trailing(left) if self._perishable else self._copy_history(left)",
        "self._copy_history(left) if self._paths else self._copy_trailing(left)",
        (DEMOTED,),
    ),
    Mutant(
        "history goes down from its front",
        DEMOTION,
        "start = max(end - most, 0)",
        "start = max(match.logical_pages - end, 0)",
        (DEMOTED,),
    ),
    Mutant(
        "a queue that others had filled ends all copies",
        DEMOTION,
        "self._is_full = False  # or it is found out again",
        "# it is found out again",
        (DEMOTED,),
    ),
    Mutant(
        "copies that were called off are forgotten",
        DEMOTION,
        "            if transfer.is_cancelled and transfer.num_ok < transfer.num_pages:\n"
        "                again()\n",
        "",
        (DEMOTED,),
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
)
