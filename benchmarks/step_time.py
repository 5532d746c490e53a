"""Time of one optimizer step on GPT-2's shapes (124.4M parameters), DeMo beside torch's fused AdamW, in turn.

    python benchmarks/step_time.py --values float32 sign --rounds 7

Prints medians and the range in seconds, the ratio to AdamW within the same run, and the bytes of a message.
"""

import argparse
import statistics
import time

import torch

import demopt

WIDTH, LAYERS, VOCABULARY, CONTEXT = 768, 12, 50257, 1024


def gpt2_shapes() -> list[tuple[int, ...]]:
    """All parameters of GPT-2 small, the output embedding tied."""
    matrices = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
    biases = [(rows,) for rows, _ in matrices]
    norms = [(WIDTH,)] * 4
    return [(VOCABULARY, WIDTH), (CONTEXT, WIDTH), *LAYERS * (matrices + biases + norms), (WIDTH,), (WIDTH,)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", nargs="+", default=["float32", "sign"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(0.02 * torch.randn(shape)) for shape in gpt2_shapes()]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizers: dict[str, torch.optim.Optimizer] = {"AdamW, fused": torch.optim.AdamW(parameters, lr=1e-6, fused=True)}
    for values in arguments.values:
        optimizers[f"DeMo, {values}"] = demopt.DeMo(parameters, lr=1e-6, values=values)
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    for number in range(arguments.rounds + 1):
        for name, optimizer in optimizers.items():
            began = time.perf_counter()
            optimizer.step()
            if number:  # the first one warms up
                seconds[name].append(time.perf_counter() - began)
    count = sum(parameter.numel() for parameter in parameters)
    print(f"{count / 1e6:.1f}M parameters, {torch.get_num_threads()} threads, torch {torch.__version__}, W = 1")
    base = statistics.median(seconds["AdamW, fused"])
    for name, times in seconds.items():
        median = statistics.median(times)
        line = f"{name:16} median {median:.3f} s  ({min(times):.3f} to {max(times):.3f})  {median / base:5.1f} x AdamW"
        optimizer = optimizers[name]
        if isinstance(optimizer, demopt.DeMo):
            line += f"  message {optimizer.stats.payload_bytes:,} bytes"
        print(line)


if __name__ == "__main__":
    main()
