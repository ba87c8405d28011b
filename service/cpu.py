"""How many cores this process may use: the scheduler's mask and the container's quota, not the host's count.

ONNX Runtime sizes its pools from the host (microsoft/onnxruntime #29510), so the number is always given to it.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def cpu_quota(cgroup: Path = _CGROUP) -> int:
    """Whole cores available to this process, at least 1: the smaller of affinity and cgroup quota (rounded up)."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_v2(cgroup) or _cgroup_v1(cgroup)
    return max(1, min(affinity, math.ceil(quota) if quota else affinity))


def _cgroup_v2(root: Path) -> float | None:
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _cgroup_v1(root: Path) -> float | None:
    try:
        quota = int((root / "cpu/cpu.cfs_quota_us").read_text())
        period = int((root / "cpu/cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 and period > 0 else None
