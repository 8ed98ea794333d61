"""Proof of each step: digests of what must be equal on all ranks, and samples of sums that are added again."""

from mpistrat.verify.checks import count_reduction, register, require_equal, watch
from mpistrat.verify.corruption import CorruptionError
from mpistrat.verify.digest import digest, digest_of_all

__all__ = ["CorruptionError", "count_reduction", "digest", "digest_of_all", "register", "require_equal", "watch"]
