"""The paper's training settings, used by the presets of its models (arXiv 2411.19870, v1, section 4)."""

from __future__ import annotations

from typing import Any

from demopt.optim.presets import V1

# 100B tokens: 2048 sequences of 2048 tokens a step, from 64 workers x 4 passes x 8 sequences.
SCHEDULE = {"steps": 23842, "batch": 8, "accumulate": 4, "lr": 4e-4, "warmup": 250, "final_lr": 0.1, "clip": 1.0}
PUBLISHED: dict[str, dict[str, Any]] = {
    name: {"optimizer": "demo", **SCHEDULE, **V1} for name in ("demo-300m", "demo-1b")
}
