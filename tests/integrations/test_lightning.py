"""demopt.integrations.lightning; examples/lightning_strategy.py trains and resumes with it."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import demopt
from forked import free_port

pytest.importorskip("lightning", reason="needs Lightning: make test-integrations")

import lightning.pytorch as lightning
from lightning.pytorch.plugins import MixedPrecision

from demopt.integrations.lightning import DeMoStrategy


@pytest.fixture(autouse=True)
def _environment():
    """For one rank, which Lightning starts. It leaves LOCAL_RANK set: Accelerate would then think it was launched."""
    with mock.patch.dict(os.environ, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}):
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


def trainer_of(**more):
    """A trainer with one rank and no output."""
    return lightning.Trainer(
        strategy=DeMoStrategy(process_group_backend="gloo"), accelerator="cpu", devices=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, **more,
    )  # fmt: skip


class Local(lightning.LightningModule):
    """A weight that a LocalDeMo trains."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def training_step(self, rows, number):
        return (self.weight * rows).square().mean()

    def configure_optimizers(self):
        return demopt.LocalDeMo(torch.optim.AdamW(self.parameters(), lr=0.1), sync_every=2)


def test_strategy_refuses_another_optimizer():
    class Module(lightning.LightningModule):
        def configure_optimizers(self):
            return torch.optim.AdamW([nn.Parameter(torch.ones(2))])

    trainer = lightning.Trainer(logger=False, accelerator="cpu", enable_progress_bar=False)
    strategy, module = DeMoStrategy(), Module()
    strategy._lightning_module = module
    module.trainer = trainer
    with pytest.raises(TypeError, match="the optimizer is AdamW, and with DeMoStrategy only DeMo and LocalDeMo"):
        strategy.setup_optimizers(trainer)


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_strategy_validates_and_saves_the_global_weights_between_rounds(tmp_path):
    """One rank suffices: even its local weights differ from the global ones between rounds."""
    seen = []

    class Module(Local):
        def validation_step(self, rows, number):
            entry = self.trainer.optimizers[0].state[self.weight]
            seen.append((self.weight.detach().clone(), entry["global"].clone(), entry["local"].clone()))

    loader = torch.utils.data.DataLoader(torch.randn(3, 4), batch_size=1)
    module = Module()
    saving = lightning.callbacks.ModelCheckpoint(tmp_path, "last")
    trainer = trainer_of(max_epochs=1, num_sanity_val_steps=0, callbacks=[saving])
    trainer.fit(module, loader, torch.utils.data.DataLoader(torch.randn(1, 4)))
    ((shown, shared, local),) = seen
    assert torch.equal(shown, shared)
    assert not torch.equal(local, shared), "between two rounds"
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert torch.equal(saved["state_dict"]["weight"], shared)
    assert trainer.optimizers[0].local_steps == 0, "a last round"
    trainer.optimizers[0].load_state_dict(saved["optimizer_states"][0])
    assert torch.equal(module.weight, local), "this rank goes on from its local weights"


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_strategy_averages_the_global_weights_and_a_callback_ends_with_them():
    """One rank suffices, as above: three steps, with a round after the second and a last one."""
    seen = []

    class Module(Local):
        def __init__(self):
            super().__init__()
            self.register_buffer("levels", torch.ones(4, dtype=torch.int16))  # gloo does not know this dtype

        def get_extra_state(self):  # an entry of the state that is no tensor
            return {}

        def on_train_batch_end(self, *_):
            seen.append(self.trainer.optimizers[0].state[self.weight]["global"].clone())

    class Export(lightning.Callback):
        def on_train_end(self, trainer, module):
            self.weight = module.weight.detach().clone()

    def fit(*callbacks):
        seen.clear()
        trainer = trainer_of(max_steps=3, enable_checkpointing=False, callbacks=list(callbacks))
        module = Module()
        trainer.fit(module, torch.utils.data.DataLoader(torch.ones(3, 4)))
        return module.weight.detach()

    export, average = Export(), lightning.callbacks.WeightAveraging()
    assert torch.equal(fit(export), export.weight)
    assert torch.allclose(fit(export, average), torch.stack(seen).mean(0))
    assert not torch.equal(seen[1], seen[0])
    with pytest.raises(TypeError, match="give the Trainer WeightAveraging"):
        fit(lightning.callbacks.StochasticWeightAveraging(0.1))


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_strategy_validates_and_saves_weights_that_came_after_training(tmp_path):
    seen, path, rows = [], tmp_path / "last.ckpt", torch.utils.data.DataLoader(torch.ones(3, 4))

    class Module(Local):
        def validation_step(self, rows, number):
            seen.append(self.weight.detach().clone())

    def saved():
        trainer.save_checkpoint(path)
        return torch.load(path, weights_only=True)

    module, average = Module(), lightning.callbacks.WeightAveraging()
    trainer = trainer_of(max_steps=3, enable_checkpointing=False, num_sanity_val_steps=0)
    trainer.fit(module, rows)
    loaded = saved()
    loaded["state_dict"]["weight"].fill_(7.0)
    torch.save(loaded, path)
    trainer.validate(module, rows, path, verbose=False)
    assert torch.equal(seen[-1], torch.full((4,), 7.0))
    assert torch.equal(saved()["state_dict"]["weight"], seen[-1])
    trainer = trainer_of(max_steps=3, enable_checkpointing=False, num_sanity_val_steps=0, callbacks=[average])
    trainer.fit(module, rows)
    assert torch.equal(saved()["state_dict"]["weight"], module.weight)


@pytest.mark.filterwarnings("ignore")  # Lightning's own
@pytest.mark.parametrize("fails", ["training", "validation"])
def test_strategy_leaves_nothing_of_a_fit_that_failed_for_the_next_one(fails):
    """After one local step, which the failed fit no longer shares or sends."""
    between = []  # the weights at the end of each batch, and at the start of the next one

    class Module(Local):
        def training_step(self, rows, number):
            if number == 1 and fails == "training":
                raise MemoryError
            return super().training_step(rows, number)

        def validation_step(self, rows, number):
            if fails == "validation":
                raise MemoryError

        def on_train_batch_start(self, *_):
            between.append(self.weight.detach().clone())

        on_train_batch_end = on_train_batch_start

    module, rows = Module(), torch.utils.data.DataLoader(torch.ones(3, 4))
    settings = {"num_sanity_val_steps": 0, "val_check_interval": 1}
    trainer = trainer_of(max_steps=3, max_epochs=1, enable_checkpointing=False, **settings)
    with pytest.raises(MemoryError):
        trainer.fit(module, rows, rows)
    fails = None
    nn.init.constant_(module.weight, 3.0)
    between.clear()
    trainer.fit(module, rows, rows)
    ends, starts = between[1:-1:2], between[2::2]
    assert len(starts) >= 1
    assert all(map(torch.equal, ends, starts))
    assert torch.equal(module.weight, trainer.optimizers[0].state[module.weight]["global"])
    assert not trainer.callbacks


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_strategy_saves_the_optimizer_with_the_model_on_its_device_though_lightning_moved_that(tmp_path):
    """A model that only notes where it would be: "meta" stands for the host, and the host for an accelerator."""

    class Module(Local):
        def to(self, device):
            self._device = torch.device(device)

    def noted(*_):
        seen.append(module.device.type)

    seen, module, trainer = [], Module(), trainer_of(max_steps=3, enable_checkpointing=False)
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(3, 4)))
    module.to("meta")
    with mock.patch.object(demopt.LocalDeMo, "consolidate_state_dict", noted):
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert seen == ["cpu"]
    assert module.device.type == "meta"


def _clipped(precision, **settings):
    """The norm of a weight's change in one step at rate 1, with its gradient clipped to a norm."""

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.automatic_optimization = bool(settings)

        def training_step(self, rows, number):
            loss = 100 * (self.weight * rows).mean()
            if not self.automatic_optimization:
                self.manual_backward(loss)
                self.clip_gradients(self.optimizers(), 0.25, "norm")
                self.optimizers().step()
            return loss

        def configure_optimizers(self):
            return demopt.LocalDeMo(torch.optim.SGD(self.parameters(), lr=1.0), sync_every=2)

        def on_train_batch_end(self, *_):
            self.change = (self.weight.detach() - 1).norm().item()

    module = Module()
    trainer = trainer_of(max_steps=1, enable_checkpointing=False, **precision, **settings)
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(1, 4)))
    return module.change


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_strategy_clips_gradients_in_mixed_precision():
    def half():
        return {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))}

    for precision in ({}, {"precision": "bf16-mixed"}, half()):
        assert _clipped(precision, gradient_clip_val=0.25) == pytest.approx(0.25, rel=1e-3)
    assert _clipped({"precision": "bf16-mixed"}) == pytest.approx(0.25, rel=1e-3)
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        _clipped(half())  # Lightning would clip gradients that are still scaled
