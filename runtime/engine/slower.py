"""Slower tiers of an engine, from its settings: opened over the pools, measured once.

    host     copies of a few blocks to rows and back: bytes per second of the way every load ends in
    disk     a file written and read in the cache's directory, the medium's share
    remote   nothing is asked before the first request; the planner's first guess is refined
    codecs   where one is to be chosen: on the state that calibration has just computed

This module decides nothing about requests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from statewise.radix.cost import DEFAULT_TIERS, TierCost
from statewise.radix.lossy import is_lossy
from statewise.radix.schema import CacheSchema
from statewise.radix.segment import Tier
from statewise.radix.validation import GroupEnv
from statewise.runtime.clock import Clock
from statewise.runtime.config import ServerArgs
from statewise.runtime.memory.block_store import DeviceStore
from statewise.runtime.tiers.buffers import Arena, Bytes, allocate
from statewise.runtime.tiers.codec import choose_codec
from statewise.runtime.tiers.copies import as_read
from statewise.runtime.tiers.device_io import DeviceIO, layer_bytes_of, pin
from statewise.runtime.tiers.disk import DiskTier
from statewise.runtime.tiers.files import Files
from statewise.runtime.tiers.host import even_weights
from statewise.runtime.tiers.lossy_io import LossyIO, lossy_environments
from statewise.runtime.tiers.page import GroupShape, shapes_of
from statewise.runtime.tiers.record import header_bytes
from statewise.runtime.tiers.remote import RemoteTier
from statewise.runtime.tiers.tiers import Tiers, TierSettings, open_tiers
from statewise.runtime.tiers.transfer import EngineOptions

log = logging.getLogger(__name__)
GB = 10**9
PROBE_BYTES = 16 << 20  # of the disk's measurement
CHUNK_BYTES = 4 << 20
MAX_PROBE_BLOCKS = 64
CODEC_SAMPLES = 8  # pages
AUTO = "auto"
SMALLEST_S = 1e-6
LEAST_SHARE = 1e-3  # of processor time: a load that nothing else holds up ends some time
# An I/O thread that computes holds the interpreter for at most this long (its default is 5 ms):
# a decoding step asks for it after every kernel.
SWITCH_INTERVAL_S = 5e-4


class SlowerTiers:
    """Opens and measures the tiers that settings ask for."""

    def __init__(self, args: ServerArgs, store: DeviceStore) -> None:
        self._args = args
        self._store = store
        self._item_bytes = store.groups[0].layers[0].element_size()
        self._io: DeviceIO | LossyIO = DeviceIO(store)
        self._layer_bytes = layer_bytes_of(store)
        self._block_bytes = [
            size * len(pool.layers)
            for size, pool in zip(self._layer_bytes, store.groups, strict=True)
        ]
        if is_lossy(store.schema):
            self._io = LossyIO(store, store.schema)
            self._layer_bytes = self._io.layer_bytes
        self._medium = DEFAULT_TIERS[Tier.DISK].bytes_per_s  # of the directory's medium

    @staticmethod
    def are_asked_for(args: ServerArgs) -> bool:
        """Whether there are any."""
        return bool(args.host_cache_gb or args.disk_cache_dir or args.remote_cache)

    def shapes(self, schema: CacheSchema) -> tuple[GroupShape, ...]:
        """What pages are called under a schema; its fingerprint names the weights."""
        shapes = shapes_of(schema, self._layer_bytes, 0, self._item_bytes)
        return tuple(
            replace(shape, item_bytes=1) if spec.lossy else shape
            for shape, spec in zip(shapes, schema.groups, strict=True)
        )

    def places(self) -> tuple[GroupEnv, ...]:
        """What the device's kernels declare, and the dequantiser where copies are lossy."""
        places, kind = self._store.environments(), self._args.lossy_tiers
        if not is_lossy(self._store.schema):
            return places
        return lossy_environments(places, kind, LossyIO.operators(kind))

    @property
    def lines(self) -> list[str]:
        """For the start log."""
        args = self._args
        parts = []
        if args.host_cache_gb:
            parts.append(f"host memory {args.host_cache_gb:g} GB")
        if args.disk_cache_dir:
            sealed = ", encrypted" if args.cache_key_file else ""
            parts.append(f"disk {args.disk_cache_dir} {args.disk_cache_gb:g} GB{sealed}")
        if args.remote_cache:
            parts.append(f"remote {args.remote_cache.split('?')[0]}")
        lines = [f"slower tiers: {'; '.join(parts)}"]
        if args.lossy_tiers != "none":
            lines.append(
                f"LOSSY: slower tiers keep state as {args.lossy_tiers}; what was there and comes "
                "back is approximate, and so are answers that rest on it"
            )
        return lines

    def open(self, clock: Clock) -> Tiers:
        """Open all of them. Raises TierError, saying what to change."""
        args = self._args
        settings = TierSettings(
            host_bytes=int(args.host_cache_gb * GB),
            disk_directory=args.disk_cache_dir,
            disk_bytes=int(args.disk_cache_gb * GB),
            disk_ttl_s=args.cache_ttl_hours * 3600.0,
            disk_codec=_first_codec(args.disk_cache_codec),
            remote_url=args.remote_cache,
            remote_codec=_first_codec(args.remote_cache_codec),
            key_file=args.cache_key_file,
            engine=EngineOptions(loading_share=max(args.load_share, LEAST_SHARE)),
        )
        shapes = self.shapes(self._store.schema)
        blocks = {pool.spec.name: pool.num_blocks for pool in self._store.groups}
        weights = even_weights(shapes, blocks)
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        landing = self._io.landing if isinstance(self._io, LossyIO) else as_read
        return open_tiers(
            shapes, self._io, settings, clock, weights=weights, pin=pin, landing=landing
        )

    # ---------------------------------------------------------------- measuring

    def measure(self, tiers: Tiers, clock: Clock) -> Mapping[Tier, TierCost]:
        """What a load from each tier costs; chooses codecs that are to be chosen.

        On blocks that nobody owns yet, after calibration has left state in them.
        """
        costs = self._costs(clock)
        samples, item_bytes = self._samples()
        for tier, asked in (
            (Tier.DISK, self._args.disk_cache_codec),
            (Tier.REMOTE, self._args.remote_cache_codec),
        ):
            store = tiers.stores.get(tier)
            if asked == AUTO and samples and isinstance(store, DiskTier | RemoteTier):
                rate = self._medium if tier is Tier.DISK else DEFAULT_TIERS[tier].bytes_per_s
                name = choose_codec(samples, item_bytes, rate, clock)
                store.bodies.use(name)
                log.info("codec of the %s cache: %s", tier.name.lower(), name)
        return costs

    def _samples(self) -> tuple[list[Bytes], int]:
        """Payloads of a few blocks of the largest group that hold anything; bytes of a number."""
        shapes = self.shapes(self._store.schema)
        group = max(range(len(shapes)), key=lambda g: shapes[g].block_bytes)
        count = min(self._store.groups[group].num_blocks, CODEC_SAMPLES)
        rows = Arena(shapes[group].block_bytes, count).take(count)
        self._io.read(group, list(range(count)), rows)
        return [row.data for row in rows if row.data.any()], shapes[group].item_bytes

    def _costs(self, clock: Clock) -> Mapping[Tier, TierCost]:
        costs = dict(DEFAULT_TIERS)
        landing = self._landing_rate(clock)
        costs[Tier.HOST] = TierCost(landing, DEFAULT_TIERS[Tier.HOST].latency_s)
        share = self._device_share()
        remote = costs[Tier.REMOTE]
        costs[Tier.REMOTE] = replace(remote, bytes_per_s=remote.bytes_per_s * share)
        if self._args.disk_cache_dir:
            self._medium = self._medium_rate(clock)
            rate = 1.0 / (1.0 / landing + 1.0 / (self._medium * share))
            costs[Tier.DISK] = TierCost(rate, DEFAULT_TIERS[Tier.DISK].latency_s)
        return costs

    def _device_share(self) -> float:
        """Bytes of blocks for each byte of a record: headers cost, and lossy copies are smaller.

        Plans count the device's bytes, whatever a tier holds.
        """
        shapes = self.shapes(self._store.schema)
        heads = [header_bytes(shape.name, shape.stamp, shape.num_layers) for shape in shapes]
        return sum(self._block_bytes) / (sum(heads) + sum(shape.row_bytes for shape in shapes))

    def _landing_rate(self, clock: Clock) -> float:
        """Bytes of blocks per second, from rows into blocks, digests included."""
        sizes = self._block_bytes
        group = max(range(len(sizes)), key=sizes.__getitem__)
        count = min(self._store.groups[group].num_blocks, MAX_PROBE_BLOCKS)
        rows = Arena(self.shapes(self._store.schema)[group].block_bytes, count).take(count)
        blocks = list(range(count))
        self._io.read(group, blocks, rows)
        best = float("inf")
        for _ in range(3):
            began = clock.monotonic()
            self._io.write(group, blocks, rows)
            best = min(best, clock.monotonic() - began)
        return count * sizes[group] / max(best, SMALLEST_S)

    def _medium_rate(self, clock: Clock) -> float:
        """Bytes per second of reading a file in the cache's directory."""
        files, buffer = Files(), allocate(CHUNK_BYTES)
        path = Path(self._args.disk_cache_dir).expanduser() / f"speed-{os.getpid()}"
        try:
            fd = files.create(path, PROBE_BYTES)
            try:
                for offset in range(0, PROBE_BYTES, CHUNK_BYTES):
                    files.write(fd, [buffer], offset)
                files.sync(fd)
                began = clock.monotonic()
                for offset in range(0, PROBE_BYTES, CHUNK_BYTES):
                    files.read(fd, [buffer], offset)
                seconds = clock.monotonic() - began
            finally:
                files.close(fd)
        except OSError:
            return DEFAULT_TIERS[Tier.DISK].bytes_per_s
        finally:
            with contextlib.suppress(OSError):
                files.remove(path)
        return PROBE_BYTES / max(seconds, SMALLEST_S)


def _first_codec(asked: str) -> str:
    """The codec until one was chosen."""
    return "none" if asked == AUTO else asked
