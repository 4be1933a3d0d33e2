"""The disk tier: a store of KV blocks on a local disk."""

from penstock.cache.tiers.disk.tier import DiskTier

__all__ = ["DiskTier"]
