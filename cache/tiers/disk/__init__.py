"""The disk tier: KV blocks on a local disk, found by key."""

from penstock.cache.tiers.disk.tier import DiskTier

__all__ = ["DiskTier"]
