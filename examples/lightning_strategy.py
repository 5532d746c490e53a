"""Lightning.

python examples/lightning_strategy.py        # starts both ranks; again: it resumes from the middle
"""

import argparse
from pathlib import Path

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F

import demopt
from demopt.integrations.lightning import DeMoStrategy

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30, help="of each of two epochs")
parser.add_argument("--out", type=Path, default=Path("runs/lightning"))
parser.add_argument("--demo", action="store_true", help="DeMo instead of LocalDeMo around Muon and AdamW")
args = parser.parse_args()


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        layers = (nn.Embedding(256, 32), nn.Flatten(), nn.Linear(512, 128), nn.GELU(), nn.Linear(128, 256))
        self.model = nn.Sequential(*layers)

    def training_step(self, tokens, number):
        self.loss = F.cross_entropy(self.model(tokens[:, :-1]), tokens[:, -1])
        return self.loss

    def configure_optimizers(self):
        if args.demo:
            return demopt.DeMo(demopt.muon_groups(self, lr=0.02, others=[self.model[4]]), momentum_decay=0.95)
        return demopt.LocalDeMo(demopt.muon_adamw(self, lr=0.02, others=[self.model[4]]))  # <- 1


text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
data = text.unfold(0, 17, 1)  # 16 bytes, and the next
lightning.seed_everything(0)
module = Module()
trainer = lightning.Trainer(
    strategy=DeMoStrategy(),  # <- 2
    accelerator="auto" if torch.cuda.device_count() > 1 else "cpu",
    devices=2,
    max_epochs=2,
    limit_train_batches=2 * args.steps,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    callbacks=[ModelCheckpoint(args.out, "{epoch}", save_top_k=-1)],
    logger=False,
    enable_progress_bar=False,
)
middle = args.out / "epoch=0.ckpt"
first = args.steps if middle.exists() else 0
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
trainer.fit(module, loader, ckpt_path=middle if first else None)
loss, fingerprint = module.loss.item(), module.optimizers().optimizer.fingerprint()
print(f"steps {first} to {2 * args.steps}: loss {loss:.3f}, fingerprint {fingerprint:016x}")
