"""Ray Train: two workers, each writing its own file of a checkpoint.

python examples/ray_train.py        # again: it resumes from the middle, and ends with the same bits
"""

import argparse
import tempfile
from pathlib import Path

import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch import nn
from torch.nn import functional as F

import demopt

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--out", type=Path, default=Path("runs/ray_train"))
parser.add_argument("--demo", action="store_true", help="DeMo instead of LocalDeMo around Muon and AdamW")


def own_file(folder):  # each worker writes its own file into the checkpoint
    return Path(folder, f"rank{ray.train.get_context().get_world_rank()}.pt")


def report(metrics, step, **parts):
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"step": step, **{name: part.state_dict() for name, part in parts.items()}}, own_file(folder))
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def restore(**parts):
    if (checkpoint := ray.train.get_checkpoint()) is None:
        return 0
    with checkpoint.as_directory() as folder:
        saved = torch.load(own_file(folder), weights_only=True)
    [part.load_state_dict(saved[name]) for name, part in parts.items()]
    return saved["step"]


def train(config):
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    layers = (nn.Embedding(256, 32), nn.Flatten(), nn.Linear(512, 128), nn.GELU(), nn.Linear(128, 256))
    model = prepare_model(nn.Sequential(*layers), parallel_strategy=None)  # <- 1: no DistributedDataParallel
    optimizer = demopt.LocalDeMo(demopt.muon_adamw(model, lr=0.02, others=[model[4]]))  # <- 2
    if config["demo"]:
        optimizer = demopt.DeMo(demopt.muon_groups(model, lr=0.02, others=[model[4]]), momentum_decay=0.95)

    first = restore(model=model, optimizer=optimizer)
    text = torch.tensor(list(config["text"]))
    data = text.unfold(0, 17, 1).to(get_device())  # 16 bytes, and the next
    for step in range(first, config["steps"]):
        generator = torch.Generator().manual_seed(2 * step + rank)
        tokens = data[torch.randint(len(data), (32,), generator=generator)]
        loss = F.cross_entropy(model(tokens[:, :-1]), tokens[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step + 1 == config["steps"] // 2:
            report({"loss": loss.item()}, step + 1, model=model, optimizer=optimizer)
    fingerprint = optimizer.fingerprint()
    print(f"steps {first} to {config['steps']}: loss {loss.item():.3f}, fingerprint {fingerprint:016x}")


if __name__ == "__main__":
    args = parser.parse_args()
    config = {"steps": args.steps, "demo": args.demo, "text": Path(__file__).read_bytes()}
    scaling = ScalingConfig(num_workers=2, use_gpu=torch.cuda.device_count() > 1)
    storage = RunConfig(name=args.out.name, storage_path=str(args.out.parent.absolute()))
    TorchTrainer(train, train_loop_config=config, scaling_config=scaling, run_config=storage).fit()
