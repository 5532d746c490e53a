"""Ray Train: checkpoints that hold a file of every worker."""

import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch


def report(metrics: dict[str, Any], **parts: Any) -> None:
    """`ray.train.report` with a checkpoint of all workers: `report({"loss": 1.0}, model=model, optimizer=optimizer)`.

    Each worker writes one file: the state_dict of each part, or the part itself if it has none. Call it on all workers.
    `ray.train.torch.prepare_model(model, parallel_strategy=None)` leaves out DistributedDataParallel.
    """
    with tempfile.TemporaryDirectory() as folder:
        states = {name: part.state_dict() if hasattr(part, "state_dict") else part for name, part in parts.items()}
        torch.save(states, Path(folder, _name()))
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def restore(**parts: Any) -> dict[str, Any]:
    """Loads this worker's file of the last checkpoint, if there is one; returns its content, or {}."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return {}
    with checkpoint.as_directory() as folder:
        saved: dict[str, Any] = torch.load(Path(folder, _name()), weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return saved


def _name() -> str:
    return f"rank{ray.train.get_context().get_world_rank()}.pt"
