"""Two ranks whose batches have unequally many tokens, in transformers' Trainer: DeMo that sends everything against SGD.

DeMo without momentum, with all coefficients as they are and their mean as the update, is SGD on averaged gradients. So
it ends where SGD under DistributedDataParallel does, if both average over the tokens of all ranks.
"""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import demopt
from demopt.integrations.transformers import DeMoCallback

EVERYTHING = {
    "update": "sgd", "momentum_decay": 0.0, "top_k": 4096, "transform": "identity", "values": "float32",
    "reduction": "mean",
}  # fmt: skip


def train(ours: bool, over_all_ranks: bool) -> torch.Tensor:
    set_seed(0)
    small = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**small, bos_token_id=0, eos_token_id=0))
    generator = torch.Generator().manual_seed(1)
    data = []
    for number in range(64):
        tokens = torch.randint(32, (16,), generator=generator)
        labels = tokens.clone()
        labels[2 + 5 * (number % 3) :] = -100
        data.append({"input_ids": tokens, "labels": labels})
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, report_to="none",
            max_grad_norm=0.0, learning_rate=0.5, lr_scheduler_type="constant", use_cpu=True, save_strategy="no",
            disable_tqdm=True, average_tokens_across_devices=over_all_ranks, weight_decay=0.0,
        )  # fmt: skip
        chosen = (demopt.DeMo, EVERYTHING | {"lr": 0.5}) if ours else (torch.optim.SGD, {"lr": 0.5})
        callbacks = [DeMoCallback()] if ours else []
        Trainer(model, arguments, train_dataset=data, optimizer_cls_and_kwargs=chosen, callbacks=callbacks).train()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


sgd, demo, other = train(False, True), train(True, True), train(True, False)
print(f"apart {(demo - sgd).abs().max():.1e}, without {(other - sgd).abs().max():.1e}")
sys.stdout.flush()
