"""The paper's training settings, which come with the presets of its models (arXiv 2411.19870, v1, section 4)."""

from __future__ import annotations

from typing import Any

import demopt

# 100B tokens: 2048 sequences of 2048 a step, which are 64 workers of 4 passes with 8 each.
_SCHEDULE = {"steps": 23842, "batch": 8, "accumulate": 4, "lr": 4e-4, "warmup": 250, "final_lr": 0.1, "clip": 1.0}
PUBLISHED: dict[str, dict[str, Any]] = {name: {**_SCHEDULE, **demopt.V1} for name in ("demo-300m", "demo-1b")}
