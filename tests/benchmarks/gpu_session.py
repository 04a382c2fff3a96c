"""Ten minutes of one GPU: what the package claims of it is checked, and what was left open is measured.

    python tests/benchmarks/gpu_session.py [--seconds 570] [--out FOLDER] [--device cuda] [--parts "speed" "memory" ...]

One process. Every part has a time of its own, stands by itself, and prints a line ``PASS|FAIL|INFO part: value`` for
each thing it looked at; the order is that of value, if time runs out. At the end come all lines once more as a table,
and ``gpu_session.json`` in the folder ``--out``, which is written after each part too. The exit code is 1 if a line
says FAIL.

On the CPU (``--device cpu``) everything runs in small: what needs a GPU says so, and times mean nothing. No setting of
the device is touched. Needs torch, Lightning and pytest.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(path) for path in (HERE, HERE.parent / "support", HERE.parent, HERE.parents[1])]

import torch  # noqa: E402 # after the paths
from gpu_parts import cost, exact, fits, memory  # noqa: E402
from gpu_parts.frame import Session  # noqa: E402

Part = Callable[[Session], None]

# In the order of value, with the seconds that each may take.
PARTS: dict[str, tuple[int, Part]] = {
    "environment": (10, exact.environment),
    "bitwise 16-mixed": (60, exact.bitwise_16_mixed),
    "speed": (180, cost.speed),
    "tests": (90, exact.tests),
    "memory": (40, memory.peaks),
    "memory runs out": (40, memory.runs_out),
    "syncs": (30, cost.syncs),
    "resume": (20, exact.resume),
    "sums": (20, cost.sums),
    "compile": (80, fits.compiled),
    "two ranks": (45, fits.two_ranks),
    "bitwise other": (25, exact.bitwise_other),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=570, help="for all parts together")
    parser.add_argument("--out", type=Path, default=Path(), help="where gpu_session.json is written")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    session = Session(options.device, options.out.resolve(), options.seconds)
    level, threads = logging.root.manager.disable, torch.get_num_threads()
    if not session.on_gpu:
        torch.set_num_threads(1)  # threads cost more than such small networks
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in options.parts:
                session.run(name, *PARTS[name])
    finally:
        logging.disable(level)
        torch.set_num_threads(threads)
    session.print_table()
    if session.count("FAIL"):
        sys.exit(1)


if __name__ == "__main__":
    main()
