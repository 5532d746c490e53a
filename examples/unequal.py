"""Two unequal machines in one run: the second needs four times as long per sequence, because it sleeps.

Trains on equally many samples with equal batches and with fitted ones; prints rounds per minute and the loss.
"""

import argparse
import multiprocessing
import tempfile
import time

import torch

import demopt

GLOBAL_BATCH, SYNC_EVERY = 20, 5  # sequences per step of both workers together, local steps per round
SECONDS = 0.002  # per sequence, of the fast machine


def work(name: str, slowness: float, fitted: bool, rounds: int, folder: str, ready, results) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    run = demopt.FolderExchange(folder)
    run.rounds = rounds
    optimizer = demopt.LocalDeMo(demopt.muon_adamw(model, lr=0.03), sync_every=SYNC_EVERY, process_group=run)  # <- 1
    optimizer.join()
    ready.wait()  # only so that both take part in the first round
    torch.manual_seed(int(name))
    batches, samples, began = {}, 0, time.perf_counter()
    while int(optimizer.replicator.round_number) < rounds:
        batch = batches.get(run.worker, GLOBAL_BATCH // 2)
        started = time.perf_counter()
        inputs = torch.randn(batch, 64)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        time.sleep(slowness * SECONDS * batch)
        samples += batch
        optimizer.samples = samples  # this worker's weight in the next round
        run.note = batch / (time.perf_counter() - started)  # its speed, for the others
        run.leaving = int(optimizer.replicator.round_number) == rounds - 1 and optimizer.local_steps == SYNC_EVERY - 1
        last = run.last
        optimizer.step()
        if run.last is not last:
            samples = 0
            speeds = {sender.worker: sender.note for sender in run.decided.senders}
            if fitted and run.worker in speeds:
                batches = demopt.fit_batches(speeds, GLOBAL_BATCH, batches)  # <- 2
    seconds = time.perf_counter() - began
    with optimizer.shared():
        inputs = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().item()
    results.put((name, batch, 60 * rounds / seconds, loss, optimizer.fingerprint()))
    run.wait_for_uploads()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    context = multiprocessing.get_context("spawn")
    for fitted in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            ready, results = context.Barrier(2), context.Queue()
            shared = (fitted, rounds, folder, ready, results)
            workers = [context.Process(target=work, args=(str(n), factor, *shared)) for n, factor in enumerate((1, 4))]
            [worker.start() for worker in workers]
            fast, slow = sorted(results.get() for _ in workers)
            [worker.join() for worker in workers]
        assert fast[-1] == slow[-1], "the workers' weights differ"
        batches = f"{'fitted' if fitted else 'equal'} batches {fast[1]} and {slow[1]}"
        print(f"{batches}: {fast[2]:.0f} rounds per minute, loss {fast[3]:.2f}", flush=True)


if __name__ == "__main__":
    main()
