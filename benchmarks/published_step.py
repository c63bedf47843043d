"""What the published PyTorch step costs on the shapes of `step_cost.py`, ns per parameter.

    python benchmarks/published_step.py FOLDER [--topk 8 32] [--keep]

FOLDER is a checkout of github.com/bloc97/DeMo, of which nothing is part of this project. Needs
torch and einops, and idle cores: its threads slow down tenfold on busy ones.
With --keep the figures go to results/step_cost.jsonl.
"""

import argparse
import math
import os
import statistics
import sys
import time

import kept


def shapes(layers: int, width: int) -> list[tuple[int, int]]:
    layer = [(width, 3 * width), (width, width), (width, 8 * width), (4 * width, width)]
    return [(8192, width), *layer * layers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--topk", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--keep", action="store_true", help="append the figures to results/")
    args = parser.parse_args()
    sys.path.insert(0, args.folder)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}

    import torch
    from demo import DeMo

    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    sizes = shapes(args.layers, args.width)
    count = sum(map(math.prod, sizes))
    for k in args.topk:
        params = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer = DeMo(params, compression_topk=k, compression_chunk=64, lr=1e-3)
        times = []
        for _ in range(args.rounds + 2):
            start = time.perf_counter()
            optimizer.step()
            times.append(time.perf_counter() - start)
        cost = 1e9 * statistics.median(times[2:]) / count
        print(f"torch {torch.__version__}, topk={k}: {cost:.2f} ns/parameter", flush=True)
        if args.keep:
            model = f"{count / 1e6:.1f}M parameters in {len(sizes)} tensors"
            figures = {"ns per parameter": round(cost, 2)}
            name, version = f"published PyTorch code, topk {k}", f"torch {torch.__version__}"
            command = kept.command_line("FOLDER", "--topk", *map(str, args.topk))
            kept.append(
                "step_cost", name, model, kept.machine(), version, figures=figures, command=command
            )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
