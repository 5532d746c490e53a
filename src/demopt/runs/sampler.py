"""RunSampler: the batches of one worker of a run, so that all workers together read each sequence once per epoch."""

import sys
from collections.abc import Iterator
from traceback import walk_stack
from typing import Any

from demopt.runs.exchange import FolderExchange
from demopt.runs.reading import MOST_NUMBER, sequence_at
from demopt.validation import check_count, warn

#: Modules of loaders that ask for a batch before the step on the one before.
_READING_AHEAD = ("accelerate.data_loader", "lightning.pytorch.loops.fetchers", "timm.data.loader")


class RunSampler:
    """Batches of indices for a torch DataLoader (`batch_sampler`): those that the run's manifests hand to this worker.

    Each sequence is read once per epoch, whoever joins, leaves, dies or is late; twice only if a worker had read it and
    was lost before its message was in a manifest. Iteration ends when everything is read, or the run is stopped. A
    worker that has nothing to read, as in its first round, sends a message without work.

    Args:
        optimizer: a LocalDeMo over a FolderExchange. Its `samples` follow the batches, if `top_k` is None.
        sequences: number of items in the data set, the same on all workers, like `epochs` and `seed`.
        batch: indices per optimizer step, fewer in the run's last ones; workers may differ. Split it to accumulate.
        epochs: how often everything is read, each time in another order.
        seed: of the orders.
        prefetches: whether the loop asks for a batch before the step on the one before. Default: only if it does so by
            a DataLoader with `num_workers`, Accelerate, Lightning or timm's PrefetchLoader.

    If it prefetches, a batch counts as read once a `step` has trained on it, and the last one runs the rounds until all
    is read. If the loop skips the step of its first or last batches, or a lost worker's sequences come then, the run is
    not over: iterate again, until `run.is_over`.

    Raises:
        TypeError: the optimizer is in no run.
        SettingsError: during iteration, if the run has other data.

    Examples:
        >>> import demopt, torch
        >>> from demopt.runs.store import ObjectStore
        >>> data = torch.utils.data.TensorDataset(torch.randn(10, 8))
        >>> model = torch.nn.Linear(8, 2)
        >>> run = demopt.FolderExchange(ObjectStore())
        >>> optimizer = demopt.LocalDeMo(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=2, process_group=run)
        >>> sampler = RunSampler(optimizer, len(data), batch=4, epochs=2)
        >>> read = 0
        >>> for (rows,) in torch.utils.data.DataLoader(data, batch_sampler=sampler):
        ...     optimizer.zero_grad()
        ...     model(rows).square().mean().backward()
        ...     optimizer.step()
        ...     read += len(rows)
        >>> read
        20
    """

    def __init__(
        self,
        optimizer: Any,
        sequences: int,
        *,
        batch: int,
        epochs: int = 1,
        seed: int = 0,
        prefetches: bool | None = None,
    ) -> None:
        run = optimizer.replicator.session.process_group if hasattr(optimizer, "replicator") else None
        if not isinstance(run, FolderExchange):
            raise TypeError("RunSampler asks a run in a folder: LocalDeMo(process_group=demopt.FolderExchange(...))")
        self.optimizer, self.run, self.prefetches = optimizer, run, prefetches
        self.seed = check_count("seed", seed, low=-(1 << 63))
        self.sequences = check_count("sequences", sequences)
        self.batch = check_count("batch", batch)
        self._is_hooked = False  # see `_end`
        self._pending = 0  # batches without a step so far
        self._reads_ahead = False  # as far as known
        self.run.sequences.total = self.sequences * check_count("epochs", epochs)
        self.run.sequences.weigh = optimizer._settings["top_k"] is None  # samples weigh signs of all coefficients

    def __iter__(self) -> Iterator[list[int]]:
        optimizer, run, sequences = self.optimizer, self.run, self.run.sequences
        in_flight = 2 if optimizer.replicator.options.background else 1  # rounds
        of_rounds = self.batch * optimizer.sync_every * in_flight
        sequences.wanted = min(of_rounds, MOST_NUMBER)
        sequences.ahead.clear()  # of a loop that was left: nothing trains on them
        sequences.is_ending = False
        optimizer.join()
        if not self._is_hooked:
            optimizer.register_step_post_hook(self._end)
            self._is_hooked = True
        reads_ahead = self._reads_ahead = _reads_ahead() if self.prefetches is None else self.prefetches
        self._pending = given = most = 0  # batches; `most`: those asked for before the first step
        while not (run.is_over or run.leaving):
            if numbers := sequences.take(self.batch, ahead=reads_ahead):
                if not reads_ahead:
                    sequences.in_steps += len(numbers)
                self._pending += 1
                yield [sequence_at(number, self.sequences, self.seed) for number in numbers]
                given += 1
                most = given if len(sequences.ahead) == given else most
                while len(sequences.ahead) > most:  # the loop has skipped a step
                    sequences.note_step()
                if not run.joined:  # a state was loaded meanwhile
                    optimizer.join()
            elif sequences.ahead and sequences.are_all_held:  # the loader must first train on them
                sequences.is_ending = True
                return
            else:
                sequences.wanted = min(of_rounds + sum(map(len, sequences.ahead)), MOST_NUMBER)
                self._take_round()

    def _take_round(self) -> None:
        if self.optimizer.replicator.in_flight:
            self.optimizer.flush()
        else:
            self.optimizer.finish_round()

    def _end(self, *_: Any) -> None:
        """After a step: if a loader has read ahead to the end, and this was its last batch, ends the run."""
        sequences = self.run.sequences
        is_of_batch, self._pending = self._pending > 0, max(0, self._pending - 1)
        is_after = self.run.is_over and sequences.are_all_read and self.optimizer.local_steps > 0
        if is_of_batch and is_after and not self._reads_ahead:
            warn("this step came after the run's end, so no round has it: give RunSampler prefetches=True")
        if not sequences.is_ending or sequences.ahead:
            return
        while not (self.run.is_over or self.run.leaving or sequences.left):
            self._take_round()
        sequences.is_ending = False  # not after an error: the next step goes on
        if sequences.left:
            warn(
                "sequences came to this worker after the end of its DataLoader, of a lost worker or of steps that were "
                "dropped: iterate again, as by `while not run.is_over:` around the loop, to read them"
            )


def _reads_ahead() -> bool:
    """Whether the caller of a sampler asks for batches before the steps on earlier ones, as some loaders do.

    Nothing else tells: a loop that skips a step, or accumulates, asks as they do. So this looks at who is calling.
    """
    callers = (type(frame.f_locals.get("self")) for frame, _ in walk_stack(sys._getframe()))
    return any(
        each.__name__.endswith("MultiProcessingDataLoaderIter")
        or each.__module__.replace("pytorch_lightning", "lightning.pytorch") in _READING_AHEAD
        for each in callers
    )
