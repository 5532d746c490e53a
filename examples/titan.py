"""torchtitan's debug model on CPUs and gloo: FSDP2 inside a replica, DeMo between two.

torchrun --nproc-per-node 2 examples/titan.py        # or 4: two replicas of two shards; again: it resumes
"""
# ruff: noqa: E402 - torchtitan's device is set before the rest of it is imported

import argparse
import dataclasses
from pathlib import Path
from unittest.mock import MagicMock

import torch
import torchtitan.tools.utils as device
from datasets import Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--out", default="runs/titan")
parser.add_argument("--demo", action="store_true", help="DeMo instead of LocalDeMo around AdamW")
args = parser.parse_args()

if torch.accelerator.device_count() < 2:  # torchtitan asks for a GPU and its memory; a stand-in answers
    answers = {"get_device_name": "CPU", "get_device_properties": MagicMock(total_memory=1 << 30)}
    answers |= {"memory_stats": {}, "current_device": 0, "device_count": 1}
    gpu = MagicMock(**{f"{name}.return_value": answer for name, answer in answers.items()})
    device.device_type, device.device_module = "cpu", gpu
vars(torch.distributed).setdefault("set_timeout", lambda *_: None)  # torchtitan 0.3 needs a torch that has it

from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig, text_datasets
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger

from demopt.integrations.torchtitan import DeMoContainer, parallelize


class Bytes(BaseTokenizer):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config): ...

    def __init__(self, config, tokenizer_path):
        super().__init__()
        self.eos_id = 256

    def encode(self, text, **_):
        return [*text.encode(), self.eos_id]

    def decode(self, tokens): ...

    def get_vocab_size(self):
        return 257


lines = [f"{part} {number}" for part in Path(__file__).read_text().split("\n\n") for number in range(50)]
text_datasets.DATASETS["own"] = DatasetConfig("", lambda _: Dataset.from_dict({"text": lines}), lambda row: row["text"])

init_logger()
config = llama3_debugmodel()
config.dump_folder, spec = args.out, config.model_spec
for _, _, layer, name in spec.model.traverse(FlexAttention.Config):  # compiling it takes minutes
    setattr(layer, name, ScaledDotProductAttention.Config())
spec.parallelize_fn = parallelize(spec.parallelize_fn)  # <- 1
name, rounds = "DeMo" if args.demo else "LocalDeMo", {"LocalDeMo": {"sync_every": 2}}  # divides interval
group = ParamGroupConfig(pattern=".*", optimizer_name=name, optimizer_kwargs={"lr": 8e-4})
config.optimizer = DeMoContainer.Config(param_groups=[group], optimizer_factory_kwargs_by_name=rounds)  # <- 2
config.parallelism.spmd_backend = "partial_dtensor"
config.parallelism.data_parallel_replicate_degree = 2  # the replicas, with a slow link between them
config.tokenizer, config.dataloader.dataset = Bytes.Config(), "own"
config.training.steps, config.training.local_batch_size, config.training.seq_len = args.steps, 2, 64
config.checkpoint.enable, config.checkpoint.interval = True, args.steps // 2
first = args.steps // 2 if Path(args.out, "checkpoint").exists() else 0
config.checkpoint.load_step = first or -1

trainer = config.build()
trainer.train()
print(f"steps {first} to {args.steps}: fingerprint {trainer.optimizers.optimizers[0].fingerprint():016x}")
trainer.close()
