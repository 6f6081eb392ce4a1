"""Slower tiers: host memory, local disk, object storage, and the copies between them."""
