"""`make coverage`: prints what share of its branches each package's tests have taken, and fails under the floor.

Reads what `coverage json` wrote. The floor is one of branches alone; lines, and both together, are shown beside them.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

FLOORS = {"rules": 95.0, "server": 95.0, "transport": 95.0, "formats": 95.0}


def main(file: str) -> int:
    """Prints the table; returns 1 if a package is under its floor."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for path, found in json.loads(Path(file).read_text())["files"].items():
        parts = Path(path).parts
        package = parts[parts.index("torchquorum") + 1]
        total = found["summary"]
        numbers = (total["covered_lines"], total["num_statements"], total["covered_branches"], total["num_branches"])
        counts[package] = [a + b for a, b in zip(counts[package], numbers, strict=True)]
    low = []
    print(f"{'package':14}{'lines':>9}{'branches':>10}{'both':>9}  floor")
    for package, (lines, all_lines, branches, all_branches) in sorted(counts.items()):
        both = 100 * (lines + branches) / max(1, all_lines + all_branches)
        share = 100 * branches / max(1, all_branches)
        floor = FLOORS.get(package)
        print(f"{package:14}{100 * lines / max(1, all_lines):>8.1f}%{share:>9.1f}%{both:>8.1f}%  {floor or ''}")
        if floor is not None and share < floor:
            low.append(f"{package}: {share:.1f} % of branches")
    if low:
        print(f"under the floor: {', '.join(low)}; `coverage report -m` names the lines")
    return int(bool(low))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
