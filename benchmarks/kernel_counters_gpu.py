"""Reads the hardware counters of gather and scatter on a GPU, compared with a kernel that copies one long piece.

    python benchmarks/kernel_counters_gpu.py --json FILE

Runs itself under Nsight Compute (`ncu` of the CUDA toolkit), which repeats every kernel with cold caches until it has all
counters. Clocks are not locked. The pages are those of `gather_scatter_gpu.py`. Every slab is compared with indexing before
it is profiled. The copy has the same tile and compiler but no pages: no gather can be faster than it.

"of peak", "L2 hits", "SM" (its busiest unit) and "warps" are percentages. "waits" are stalled warps per issued instruction:
stalled on reads, on the queue of memory instructions, and on their last writes. A time under `ncu` is the kernel's on the
device, without its launch.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from gather_scatter_gpu import CASES, OPERATIONS, WORKER_TUNINGS, Bench, queue_piece

SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "WarpStateStats", "LaunchStats", "Occupancy", "SchedulerStats")
# Columns: heading, counter, divisor.
SHOWN = {
    "us": ("gpu__time_duration.sum", 1e3),
    "DRAM GB/s": ("dram__bytes.sum.per_second", 1e9),
    "of peak": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "L2 hits": ("lts__t_sector_hit_rate.pct", 1),
    "SM": ("sm__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "warps": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1),
    "waits: read": ("smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio", 1),
    "queue": ("smsp__average_warps_issue_stalled_lg_throttle_per_issue_active.ratio", 1),
    "end": ("smsp__average_warps_issue_stalled_drain_per_issue_active.ratio", 1),
}
LIMIT_S = 300
PICKED = ("70B 4->1", "70B 1->4")
PROFILED = "CUDAProfiled"  # set for the profiled process


def profiled(sizes: list[float]) -> None:
    """Run each kernel once within the profiler's range. Called in the profiled process."""
    device = torch.device("cuda:0")
    tunings = WORKER_TUNINGS
    cases = [case for case in CASES if case.name in PICKED]
    for case, operation, megabytes in itertools.product(cases, OPERATIONS, sizes):
        bench = Bench(case, operation, case.layers, megabytes, device)
        bench.check(lambda bench=bench, operation=operation: bench.run(tunings[operation]), operation)  # type: ignore[misc]
        queue_piece(bench.ends(), bench.stream)
        torch.cuda.synchronize()
        print(f"profiled,{case.name},{operation},{bench.payload_bytes}", flush=True)
        torch.cuda.cudart().cudaProfilerStart()  # type: ignore[no-untyped-call]
        queue_piece(bench.ends(), bench.stream)
        torch.cuda.synchronize()
        bench.run(tunings[operation])
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()  # type: ignore[no-untyped-call]
        bench.close()


def counted(ncu: str, sizes: str) -> tuple[list[list[str]], list[dict[str, str]]]:
    """Run this script under ncu; return the profiled cases in order, and every kernel's counters with their units."""
    sections = [word for section in SECTIONS for word in ("--section", section)]
    command = [ncu, "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw", *sections]
    command += [sys.executable, __file__, "--sizes", sizes]
    found = subprocess.run(
        command, env=os.environ | {PROFILED: "1"}, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    lines = found.stdout.splitlines()
    if found.returncode or not any(line.startswith('"ID"') for line in lines):
        raise SystemExit(
            f"{shlex.join(command)} ended with {found.returncode}: {found.stdout[-2000:]}{found.stderr[-2000:]}"
        )
    table = list(csv.reader(line for line in lines if line.startswith('"')))
    names = [line.split(",")[1:] for line in lines if line.startswith("profiled,")]
    # The second line has the units.
    return names, [dict(zip(table[0], row, strict=False)) for row in table[2:]]


def numbers_of(row: dict[str, str]) -> dict[str, float]:
    """Return a kernel's row of the table."""
    return {title: float(row[counter].replace(",", "")) / scale for title, (counter, scale) in SHOWN.items()}


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--sizes", default="16,84,257", help="MB of a slab, separated by commas")
    options = parser.parse_args()
    if os.environ.get(PROFILED):
        profiled(list(map(float, options.sizes.split(","))))
        return
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: this benchmark needs one")
    ncu = shutil.which("ncu", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))
    if ncu is None:
        print("left out: ncu of the CUDA toolkit is not installed")
        if options.json:
            options.json.write_text(json.dumps({"left_out": "ncu is not there"}) + "\n", encoding="utf-8")
        return
    names, rows = counted(ncu, options.sizes)
    if len(rows) != 2 * len(names):
        raise SystemExit(
            f"{len(rows)} kernels were profiled instead of {2 * len(names)}: {[row['Kernel Name'] for row in rows]}"
        )
    result: list[dict[str, Any]] = []
    print(f"{'pages':12}{'kernel':10}{'MB':>7}" + "".join(f"{title:>12}" for title in SHOWN))
    for index, row in enumerate(rows):
        case, operation, length = names[index // 2]
        operation = operation if index % 2 else "one piece"
        numbers = numbers_of(row)
        cells = "".join(f"{number:12.1f}" for number in numbers.values())
        print(f"{case:12}{operation:10}{int(length) / 1e6:7.1f}{cells}", flush=True)
        result.append({"case": case, "kernel": operation, "bytes": int(length)} | numbers)
    if options.json:
        options.json.write_text(json.dumps({"rows": result}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
