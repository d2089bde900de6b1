"""Shows a run's numbers as a table, as JSON and as a plot. Called by `transfer`; measures nothing."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

from longshore_cli.aligned import aligned
from longshore_lab.bench.results import MIB, Report, SizeResult
from longshore_lab.devices import WAYS_LEFT_OUT, describe

_BARE = {
    "bare path": "bare path",
    "transport": "one descriptor",
    "transport slices": "bare slices",
    "copy": "plain copy",
}


def table(report: Report) -> str:
    """Return aligned tables: rates, then processor seconds for a gigabyte."""
    if report.placement.on_gpus:
        return _table_on_gpus(report)
    names = [course.name for course in report.courses]
    staged = next((course.name for course in report.courses if course.way == "Staged"), None)
    header = ["MiB", *names, *_BARE.values(), "bound", *(["staged/bare path", "staged/bound"] if staged else [])]
    rates, cores = [header], [["MiB", *names, *_BARE.values()]]
    for size in report.sizes:
        row = [str(size.length_bytes // MIB)]
        row += [_number(size.rate(name)) for name in (*names, *_BARE)]
        row.append(_number(size.bound))
        if staged:
            rate = size.rate(staged) or 0.0
            row += [_percent(rate, size.rate("bare path") or 0.0), _percent(rate, size.bound)]
        rates.append(row)
        cores.append([str(size.length_bytes // MIB), *(_number(_core(size, name)) for name in (*names, *_BARE))])
    return "\n".join(
        [
            machine(),
            f"{report.backend} over {report.wire}; pages of {report.page_size} tokens; medians of {report.repeats}",
            f"slices of {report.slice_bytes} B in batches of {report.batch}; every byte compared",
            "",
            "GB/s",
            *aligned(rates),
            "",
            "core-seconds per GB, all processes",
            *aligned(cores),
        ]
    )


def _table_on_gpus(report: Report) -> str:
    """Return rates and their shares of a plain copy. The processor's bound does not apply on GPUs."""
    names = [course.name for course in report.courses]
    over = f"{report.backend} over {report.wire}; pages of {report.page_size} tokens; medians of {report.repeats}"
    rows = [["MiB", *names, "plain copy", *(f"{name}/copy" for name in names)]]
    for size in report.sizes:
        rates = [size.rate(name) for name in (*names, "copy")]
        shares = [_percent(rate or 0.0, rates[-1] or 0.0) for rate in rates[:-1]]
        rows.append([str(size.length_bytes // MIB), *map(_number, rates), *shares])
    return "\n".join(
        [
            machine(),
            describe(report.placement),
            f"{over}; every byte compared",
            f"left out on GPUs: {WAYS_LEFT_OUT}; the bare transport and the bare path",
            "",
            "GB/s",
            *aligned(rows),
        ]
    )


def as_json(report: Report) -> str:
    """Return every number of the run."""
    sizes = [
        {
            "bytes": size.length_bytes,
            **({} if report.placement.on_gpus else {"bound_gb_per_s": size.bound}),
            "lines": {
                name: {
                    "gb_per_s": size.rate(name),
                    "core_s_per_gb": _core(size, name),
                    "seconds": series.seconds,
                    "core_s": series.core_s,
                }
                for name, series in size.lines.items()
            },
        }
        for size in report.sizes
    ]
    whole = {
        "machine": machine(),
        "backend": report.backend,
        "wire": report.wire,
        "page_size": report.page_size,
        "slice_bytes": report.slice_bytes,
        "slices_batch": report.batch,
        "repeats": report.repeats,
        "bytes_equal": True,
        "sizes": sizes,
    }
    if report.placement.on_gpus:
        whole["devices"] = report.placement._asdict()
    return json.dumps(whole, indent=2) + "\n"


def plot(report: Report, path: Path) -> None:
    """Draw rates over sizes, both logarithmic."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter

    figure, axes = plt.subplots(figsize=(8, 4.8), dpi=120)
    sizes = [size.length_bytes / MIB for size in report.sizes]
    styles = {
        "bare path": ("black", "--", "gather, write, scatter alone"),
        "transport": ("0.35", "--", "one descriptor, bare transport"),
        "transport slices": ("0.65", ":", "slices, bare transport"),
    }
    for index, course in enumerate(report.courses):
        _line(axes, report, course.name, color=f"C{index}", marker="o", linewidth=2, label=course.name)
    for name, (color, style, label) in styles.items():
        _line(axes, report, name, color=color, linestyle=style, linewidth=1.6, label=label)
    if report.placement.on_gpus:
        _line(axes, report, "copy", color="black", linestyle="--", linewidth=1.6, label="plain copy")
    else:
        bound = [size.bound for size in report.sizes]
        axes.plot(sizes, bound, color="black", linewidth=1.2, label=f"bound of {os.cpu_count()} cores, staged")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xticks(sizes)
    axes.set_xlabel("MiB of one request's KV")
    axes.set_ylabel("GB/s")
    axes.set_title(f"From prefill's pages to decode's pages, {report.backend} over {report.wire}")
    axes.grid(visible=True, which="major", color="0.88")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def machine() -> str:
    """Return a description of this machine."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{os.cpu_count()} cores of {model}, Linux {platform.release()}, Python {platform.python_version()}"


def _line(axes: object, report: Report, name: str, **style: object) -> None:
    points = [(size.length_bytes / MIB, rate) for size in report.sizes if (rate := size.rate(name)) is not None]
    if points:
        axes.plot([x for x, _ in points], [y for _, y in points], **style)  # type: ignore[attr-defined]


def _core(size: SizeResult, name: str) -> float | None:
    series = size.lines.get(name)
    return series.core_s_per_gb(size.length_bytes) if series is not None else None


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}"
