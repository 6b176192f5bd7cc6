"""`make fuzz`: throws inputs at every target and prints a table; ends with 1 if one of them found something.

    python -m tests.fuzz.run --cases 100000          so many inputs per target
    python -m tests.fuzz.run --minutes 10            so long in all
    python -m tests.fuzz.run --engine atheris --minutes 10    guided by coverage, with the extra `fuzz`
    python -m tests.fuzz.run --only codec --repeat c1ffff     one input, in hexadecimal

Each input has a deadline, and the memory of the process a limit, so a hang and a flood are finds like any other.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.fuzz.mutate import Mutator

if TYPE_CHECKING:  # atheris wants to see torchquorum imported
    from tests.fuzz.targets import Target

CASE_S = 5.0
MEMORY_BYTES = 2 << 30
MOST_FINDS = 5


class TooSlow(BaseException):
    """An input took longer than CASE_S."""


@dataclass
class Result:
    """What came of a target."""

    cases: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    answers: int = 0
    grown_mib: float = 0.0
    finds: list[str] = field(default_factory=list)


def try_one(target: Target, body: bytes) -> tuple[str, str | None]:
    """Gives one input to a target; returns the answer in words, and the find if it is one."""
    signal.setitimer(signal.ITIMER_REAL, CASE_S)
    try:
        target.call(body)
        return "understood", None
    except target.allowed as error:
        return f"{type(error).__name__}: {error}", None
    except TooSlow:
        return "too slow", f"took more than {CASE_S} s"
    except Exception as error:
        return f"{type(error).__name__}", "".join(traceback.format_exception(error, limit=-4))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def fuzz(target: Target, seed: int, cases: int, seconds: float) -> Result:
    """Tries inputs until there were so many, or the time is over."""
    mutator, result = Mutator(target.seeds, seed), Result()
    for body in target.seeds:
        mutator.tell(body, try_one(target, body)[0])
    memory_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.monotonic()
    while result.cases < cases and time.monotonic() - begun < seconds and len(result.finds) < MOST_FINDS:
        body = mutator.next()
        at = time.perf_counter()
        answer, find = try_one(target, body)
        result.slowest_s = max(result.slowest_s, time.perf_counter() - at)
        result.cases += 1
        if find is not None:
            result.finds.append(f"{find}--repeat {body[:2000].hex()}{' (cut)' if len(body) > 2000 else ''}")
        mutator.tell(body, answer)
    result.seconds, result.answers = time.monotonic() - begun, mutator.answers
    result.grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_kib) / 1024
    return result


def guided(target: Target, seed: int, seconds: float) -> None:
    """Hands a target to atheris, which ends the process."""
    import atheris  # type: ignore[import-not-found]

    def call(body: bytes) -> None:
        _, find = try_one(target, body)
        if find is not None:
            raise AssertionError(find)

    from tests.fuzz.targets import folder

    where = folder() / "corpus"
    where.mkdir(exist_ok=True)
    for number, body in enumerate(target.seeds):
        (where / str(number)).write_bytes(body)
    options = [f"-seed={seed}", f"-max_total_time={int(seconds)}", "-rss_limit_mb=4096", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *options, str(where)], call)
    atheris.Fuzz()


def main() -> int:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=sys.maxsize)
    parser.add_argument("--minutes", type=float, default=None)
    parser.add_argument("--only", help="the name of one target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=["own", "atheris"], default="own")
    parser.add_argument("--repeat", metavar="HEX")
    args = parser.parse_args()
    if args.engine == "atheris":
        import torch  # noqa: F401  (not to be followed, which would take minutes)
        from atheris import instrument_imports  # type: ignore[import-not-found]

        with instrument_imports(include=["torchquorum"]):
            from tests.fuzz import targets
    else:
        from tests.fuzz import targets
    signal.signal(signal.SIGALRM, too_slow)
    try:
        return _run(args, targets.make_targets())
    finally:
        shutil.rmtree(targets.folder(), ignore_errors=True)


def too_slow(*_: Any) -> None:
    raise TooSlow


def _run(args: argparse.Namespace, targets: dict[str, Target]) -> int:
    chosen = {args.only: targets[args.only]} if args.only else targets
    if args.repeat is not None:
        answer, find = try_one(next(iter(chosen.values())), bytes.fromhex(args.repeat))
        print(find or answer)
        return int(find is not None)
    seconds = (args.minutes or 1e6) * 60 / len(chosen)
    if args.engine == "atheris":
        guided(next(iter(chosen.values())), args.seed, seconds)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    total = failed = 0
    print(f"{'target':16}{'inputs':>10}{'per s':>9}{'answers':>9}{'slowest':>11}{'memory':>11}  finds")
    for name, target in chosen.items():
        result = fuzz(target, args.seed, args.cases, seconds)
        total, failed = total + result.cases, failed + len(result.finds)
        rate = result.cases / max(result.seconds, 1e-9)
        print(
            f"{name:16}{result.cases:>10,}{rate:>9,.0f}{result.answers:>9}{result.slowest_s * 1000:>8.0f} ms"
            f"{result.grown_mib:>+7.0f} MiB  {len(result.finds)}",
            flush=True,
        )
        for find in result.finds:
            print(f"\n{name}: {find}\n", flush=True)
    print(f"{total:,} inputs, {failed} finds; seed {args.seed}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
