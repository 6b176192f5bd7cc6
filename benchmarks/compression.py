"""What compression costs: GB of float32 a second, in, on one core.

    python benchmarks/compression.py [--numbers 16777216] [--rounds 5] [--output DIR]

The best of the rounds, interleaved with torch.topk alone: noise only adds.
"""

import time
from collections.abc import Callable

import results
import torch
from results import Floor, Result

from torchquorum.compress.compressor import read_compressor
from torchquorum.compress.feedback import Feedback

FLOORS = {"int8": 1.0, "int4": 0.6, "topk:64/4096": 0.4, "bfloat16": 4.0}
NAMES = (*FLOORS, "topk:64/4096+2bit")


def seconds(work: Callable[[], object]) -> float:
    """Returns how long something takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(numel: int, rounds: int) -> Result:
    """Measures every compressor: encoding, decoding, and both with error feedback, as a worker does."""
    torch.set_num_threads(1)
    given = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    decoded, best = torch.empty(numel), {}
    for _ in range(rounds):
        for name in NAMES:
            compressor, feedback = read_compressor(name), Feedback(read_compressor(name), numel)
            message = torch.zeros(compressor.size_bytes(numel), dtype=torch.uint8)
            took = [
                seconds(lambda c=compressor, m=message: c.encode(given, m)),
                seconds(lambda c=compressor, m=message: c.decode(m, decoded)),
                seconds(lambda f=feedback: f.send(given, decoded)),
            ]
            best[name] = [min(pair) for pair in zip(took, best.get(name, took), strict=True)]
        rows = given.view(-1, 4096) if numel % 4096 == 0 else given[: numel // 4096 * 4096].view(-1, 4096)
        alone = seconds(lambda r=rows: [row.abs().topk(64, dim=1, sorted=False) for row in r.split(64)])
        best["torch.topk alone"] = [min(alone, best.get("torch.topk alone", [alone])[0])]
    rates = {name: [4 * numel / each / 1e9 for each in took] for name, took in best.items()}
    columns = ("encode_gb_s", "decode_gb_s", "feedback_gb_s")
    rows_out = [
        {"name": name, **{column: round(rate, 3) for column, rate in zip(columns, found, strict=False)}}
        for name, found in rates.items()
    ]
    floors = [Floor(f"{name}, encoding", rates[name][0], least, " GB/s") for name, least in FLOORS.items()]
    return Result("compression", "GB of float32 a second, one core", rows_out, floors)


def show(result: Result) -> None:
    """Prints the table."""
    names = ("encode_gb_s", "decode_gb_s", "feedback_gb_s")
    rows = [[row["name"], *(f"{row[n]:.2f}" if n in row else "" for n in names)] for row in result.rows]
    print(results.table(["", "encode, GB/s", "decode, GB/s", "with error feedback, GB/s"], rows))
    results.say(result)


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = results.parser(__doc__)
    parser.add_argument("--numbers", type=int, default=1 << 24)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    results.report(lambda: measure(args.numbers, args.rounds), show, args.output)


if __name__ == "__main__":
    main()
