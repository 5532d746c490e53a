"""Four homes that cannot reach each other train through one store: slow links, cuts, a slow home.

    python -m laboratory.network.homes --out homes.json      # as root

Machine 0 is an S3 server (SeaweedFS), machines 1 to 4 are homes; the links are theirs. All must end with the same
weights, those of `replay`, and every local step must count once. Waits that a home reports are kept with the results.
Speed is not measured. Cases that --out has already are not measured again.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import demopt
from laboratory import seaweed
from laboratory.churn import add_row, counted, loss_of, rounds_of, small_model, text, weights_digest
from laboratory.network.machines import Link
from laboratory.network.scenario import Cut, Scenario, run

HOMES, SYNC_EVERY, PORT = 4, 5, 5000
LATE = 5.0  # seconds that a round waits
STEP, SLOW_STEP = 0.1, 2.0  # seconds per local step; the slow home's rounds take longer than the others wait
STORE, RUN = "10.77.0.1", "s3://bucket/run"
SLOW, LARGE = {"SLOW_HOME": "4"}, {"LARGE": "3800000"}  # parameters beside the model's
VALUES: dict[str, Any] = {"top_k": 4096, "values": "float32"}  # then messages have 15.5 MB, as of 124M signs
CASES: dict[str, tuple[Link, float, dict[str, str]]] = {  # the link, the store's cut in seconds, the environment
    "10 Mbit/s, 100 ms": (Link("10mbit", 100), 0, {}),
    "100 Mbit/s, 20 ms": (Link("100mbit", 20), 0, {}),
    "store cut for 5 s": (Link("100mbit", 20), 5, {}),
    "store cut for 30 s": (Link("100mbit", 20), 30, {}),
    "store cut for 60 s": (Link("100mbit", 20), 60, {}),
    "a slow home": (Link("100mbit", 20), 0, SLOW),
    "messages as of 124M parameters": (Link("10mbit", 100), 0, LARGE),
}


def serve(rounds: int) -> None:
    """Serves S3 until all homes have ended, then replays the run."""
    place = tempfile.TemporaryDirectory()
    server = seaweed.start(Path(place.name), STORE, PORT, subprocess.DEVNULL)
    seaweed.make_bucket(STORE, PORT, server)
    store = demopt.FolderExchange("s3://bucket/homes").store
    while len(store.list("ended")) < HOMES:
        time.sleep(0.5)
    replay = subprocess.run(
        [sys.executable, "-m", "demopt.cli", "replay", RUN], capture_output=True, text=True, check=True
    )
    run = demopt.FolderExchange(RUN).store
    manifests = [json.loads(run.get(f"rounds/{number:08d}/manifest", 1 << 20) or b"{}") for number in range(rounds)]
    senders = [len(manifest["senders"]) for manifest in manifests]
    print(json.dumps({"replay": replay.stdout.split()[-1], "senders": senders, **counted(RUN, rounds)}), flush=True)
    server.kill()
    server.wait()
    place.cleanup()
    os._exit(0)


def live(number: int, rounds: int) -> None:
    """Trains as one home."""
    torch.set_num_threads(1)
    seaweed.make_bucket(STORE, PORT)  # waits for the server
    homes = demopt.FolderExchange("s3://bucket/homes")
    reached = [other for other in range(1, HOMES + 1) if other != number and answers(f"10.77.0.{other + 1}")]
    model, data, draw = small_model(), text(), torch.Generator().manual_seed(number)
    run = demopt.FolderExchange(RUN, late=LATE, keep_log=True)
    run.rounds = rounds
    run.say = lambda line: print(f"said: {line}", flush=True)
    large = int(os.environ.get("LARGE", 0))
    model.register_parameter("more", torch.nn.Parameter(torch.zeros(large)) if large else None)
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    values = VALUES if large else {}
    optimizer = demopt.LocalDeMo(inner, sync_every=SYNC_EVERY, process_group=run, **values)
    optimizer.join()
    homes.store.put_if_absent(f"joined/{number}", b"")
    while len(homes.store.list("joined")) < HOMES:  # none begins alone
        time.sleep(0.5)
    taken = listed = 0
    pause = SLOW_STEP if os.environ.get("SLOW_HOME") == str(number) else STEP
    while (done := rounds_of(run)) < rounds:
        optimizer.zero_grad()
        loss_of(model, data, torch.randint(len(data) // 2, (32,), generator=draw)).backward()
        if large:
            model.more.grad = torch.randn(large, generator=draw)
        time.sleep(pause)
        taken += 1
        run.note = {"steps": [listed, taken]}
        optimizer.step()
        if rounds_of(run) > done:
            listed = taken if run.row is not None else listed
            waited, whom = (run.last.waited, run.last.waited_for) if run.last else (0.0, ())
            more = f", waited {waited:.1f} s for {', '.join(whom) or 'the store'}" if waited > 2 else ""
            print(f"round {rounds_of(run)}{more}", flush=True)
    ends = {"sha256": weights_digest(model, optimizer), "reached": reached}
    print(json.dumps({**ends, "message": optimizer.replicator.message_bytes}), flush=True)
    homes.store.put_if_absent(f"ended/{number}", b"")
    os._exit(0)


def answers(address: str) -> bool:
    """Whether another machine can be reached: it refuses a connection, where a silent network gives no answer."""
    try:
        socket.create_connection((address, 9), timeout=3).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Runs one case; the store is cut after about a third of the rounds."""
    link, cut, more = CASES[name]
    store = {**seaweed.environment(STORE, PORT), "OMP_NUM_THREADS": "1"}  # float sums depend on threads
    command = ("{python}", "-m", "laboratory.network.homes", "--rank", "{rank}", "--rounds", str(rounds))
    outage = Cut(f"round {1 + rounds // 4}", cut) if cut else None
    (found,) = run(
        Scenario(HOMES + 1, command, (link,), hub=True, limit_seconds=2400, environment={**store, **more}, cut=outage)
    )
    outputs = [answer["output"] for answer in found["answers"]]
    if found["late"] or any(answer["exit"] for answer in found["answers"]):
        return {"failed": [lines[-3:] for lines in outputs]}
    ends = [json.loads(lines[-1]) for lines in outputs]
    lines = [(number, line) for number, output in enumerate(outputs[1:], 1) for line in output[:-1]]
    waits = [float(line.split("waited ")[1].split()[0]) for _, line in lines if "waited " in line]
    return {
        "rounds": rounds, "same_weights": len({end["sha256"] for end in ends[1:]}) == 1,
        "replay_agrees": ends[0].pop("replay") == ends[1]["sha256"],
        "reached_each_other": any(end["reached"] for end in ends[1:]), "message_bytes": ends[1]["message"],
        **ends[0], "waits_over_2_seconds": len(waits), "longest_wait_seconds": max(waits, default=None),
        "said": [f"home {number}: {line}" for number, line in lines if line.startswith("said")],
    }  # fmt: skip


def main() -> None:
    """Runs all cases; on a machine of one, its part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("homes.json"))
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    if given.rank is not None:
        live(given.rank, given.rounds) if given.rank else serve(given.rounds)
    for name in given.cases:
        add_row(given.out, name, partial(measure, name, given.rounds))


if __name__ == "__main__":
    main()
