"""Figures and tables of recorded measurements: `backnorm report` over the files that `backnorm bench -o` writes."""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .bench import geometric_mean
from .bench_peers import PEERS
from .ops import OPS

#: How the contestants look: colour, marker, filled.
_LOOKS = {
    "ours": ("#1b62c4", "o", True),
    "torch": ("#6f7680", "o", False),
    "compile": ("#d9730d", "D", False),
    "liger": ("#2a8a57", "^", False),
}
_NAMES = {"ours": "backnorm", "torch": "PyTorch", "compile": "torch.compile", "liger": "Liger"}
_DTYPES = {"float32": ("#1b62c4", "o"), "bfloat16": ("#d9730d", "D"), "float16": ("#2a8a57", "^")}
_INK, _FAINT = "#24292f", "#d6dae0"
_TITLES = {
    "layer_norm_backward": "LayerNorm, rows×columns",
    "group_norm_backward": "GroupNorm, N×C×HW",
    "batch_norm_backward_reduce": "BatchNorm reduce, N×C×HW",
}


class BadResults(Exception):
    """A file that is no record of measurements; the text says why."""


@dataclass(frozen=True)
class Results:
    """A file of measurements: what it says of the machine, and its lines."""

    machine: dict[str, Any]
    lines: list[dict[str, Any]]

    @property
    def on_gpu(self) -> bool:
        return "copy_tb_s" in self.machine

    def of(self, op: str, dtype: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if (line["op"], line["dtype"]) == (op, dtype)]

    @property
    def dtypes(self) -> list[str]:
        return [dtype for dtype in _DTYPES if any(line["dtype"] == dtype for line in self.lines)]

    @property
    def peers(self) -> list[str]:
        return [peer for peer in PEERS if any(ratio(line, peer) is not None for line in self.lines)]


def ratio(line: dict[str, Any], peer: str) -> float | None:
    """A peer's time over ours, None where it was not measured."""
    return line["ratio"] if peer == "torch" else line.get(f"{peer}_ratio")


def read(path: str) -> Results:
    try:
        with open(path, encoding="utf-8") as file:
            machine, *lines = [json.loads(line) for line in file if line.strip()]
    except OSError as error:
        raise BadResults(f"cannot read {path!r}: {error.strerror}") from None
    except ValueError as error:  # no JSON, no UTF-8, or no line at all
        raise BadResults(f"{path!r} is no file of measurements, one JSON object a line: {error}") from None
    for number, line in enumerate([machine, *lines], 1):
        needed = ("op", "sample", "dtype", "ratio", "share") if number > 1 else ("backnorm", "device")
        absent = [key for key in needed if not isinstance(line, dict) or key not in line]
        if absent:
            raise BadResults(
                f"{path!r}, line {number}: {', '.join(absent)} missing; `backnorm bench -o` writes such files"
            )
    if not lines:
        raise BadResults(f"{path!r} has no measurements")
    for line in lines:
        if line["op"] not in OPS or line["dtype"] not in _DTYPES:
            raise BadResults(f"{path!r}: unknown operator or data type: {line['op']}, {line['dtype']}")
    return Results(machine, lines)


def label(op: str, sample: str) -> str:
    """A sample's name as a person would write it."""
    if sample.startswith("odd_"):
        sizes = sample[4:].split("x")
        if op == "layer_norm_backward":
            return "×".join(sizes) + ", odd"
        n, c, hw, pixels, *group = sizes
        words = [f"{n}×{c}×{hw}", *[f"{g} group{'s' if g != '1' else ''}" for g in group]]
        return ", ".join([*words, *(["channels-last"] if pixels == "1" else []), "odd"])
    sample = re.sub(r"rows(\w+?)_cols(\w+)", r"\1×\2", sample)
    words = []
    for word in sample.split("_"):
        if re.fullmatch(r"\d+(x\d+)+", word):
            word = word.replace("x", "×")
        word = re.sub(r"^groups(\d+)$", r"\1 groups", word)
        word = re.sub(r"^cols(\w+)$", r"\1 columns", word)
        words.append("channels-last" if word == "pixels" else word)
    return re.sub(r" (\d+ groups|channels-last)", r", \1", " ".join(words))


def title(results: Results) -> str:
    machine = results.machine
    if results.on_gpu:
        return f"{machine['device']}, PyTorch {machine.get('torch', '?').partition('+')[0]}"
    return f"CPU, {machine.get('threads', '?')} threads, PyTorch {machine.get('torch', '?').partition('+')[0]}"


# --- the table ---


COLUMNS = ("operator", "dtype", "against", "shapes", "ratio", "worst", "at", "share", "best")


def legend(results: Results) -> str:
    of = "of the limit" if results.on_gpu else "of the bandwidth probed beside it"
    return f"ratio: its time over ours, geometric mean; share: {of}, median over the shapes"


def summary(results: Results) -> list[tuple[str, ...]]:
    """The table: a row for each operator, data type and peer; ratios as geometric means."""
    rows: list[tuple[str, ...]] = []
    for op in OPS:
        for dtype in results.dtypes:
            shares = [line["share"] for line in results.of(op, dtype)]
            for peer in results.peers:
                measured = [
                    (r, line["sample"]) for line in results.of(op, dtype) if (r := ratio(line, peer)) is not None
                ]
                if measured:
                    worst, where = min(measured)
                    mean = geometric_mean([value for value, _ in measured])
                    cells = (OPS[op].folder, dtype, _NAMES[peer], str(len(measured)), f"{mean:.2f}", f"{worst:.2f}")
                    share = f"{statistics.median(shares):.2f}", f"{max(shares):.2f}"
                    rows.append((*cells, label(op, where), *share))
    return rows


# --- the figure ---


def draw(results: Results, path: str) -> None:
    """Write the figure, in the format of the file's ending; the same file for the same measurements."""
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.hashsalt": "backnorm", "font.size": 8, "font.family": "DejaVu Sans", "text.color": _INK,
        "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        dtype = "bfloat16" if "bfloat16" in results.dtypes else results.dtypes[0]
        if results.on_gpu:
            rows = {op: results.of(op, dtype) for op in OPS}
        else:
            rows = {op: _by_sample([line for line in results.lines if line["op"] == op]) for op in OPS}
        rows = {op: lines for op, lines in rows.items() if lines}
        every = [line["ratio"] for line in results.lines]
        limits = min(*every, 0.5) * 0.85, max(*every, 2) * 1.15
        count = sum(len(lines) for lines in rows.values())
        head, between, foot = 0.9, 0.4, 0.5  # inches
        height = head + foot + 0.172 * count + between * (len(rows) - 1)
        figure = Figure(figsize=(8.6, height), facecolor="white")
        top = height - head
        for i, (op, lines) in enumerate(rows.items()):
            size = 0.172 * len(lines)
            axes = figure.add_axes((0.31, (top - size) / height, 0.605, size / height))
            last = i == len(rows) - 1
            if results.on_gpu:
                _draw_shares(axes, op, lines, results.peers, last)
            else:
                _draw_ratios(axes, op, lines, limits, last)
            figure.text(0.02, (top + 0.12) / height, _TITLES[op], fontsize=9, fontweight="bold", va="center")
            top -= size + between
        figure.text(0.02, 1 - 0.2 / height, _headline(results, dtype), fontsize=11, fontweight="bold", va="center")
        figure.text(0.02, 1 - 0.42 / height, _subtitle(results), fontsize=8, va="center", color="#57606a")
        _legend(figure, results, height)
        extra = {"metadata": {"Date": None}} if path.endswith(".svg") else {"dpi": 160}
        figure.savefig(path, facecolor="white", **extra)


def _by_sample(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line a sample, with its ratios by dtype."""
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        found.setdefault(line["sample"], {"sample": line["sample"], "ratios": {}})["ratios"][line["dtype"]] = line[
            "ratio"
        ]
    return list(found.values())


def _headline(results: Results, dtype: str) -> str:
    if results.on_gpu:
        return f"{results.machine['device']}, {dtype}: share of the memory limit"
    return f"CPU, {results.machine.get('threads', '?')} threads: PyTorch's time over backnorm's"


def _subtitle(results: Results) -> str:
    if results.on_gpu:
        speed = results.machine["copy_tb_s"]
        what = f"1: every byte is moved once, at the speed of a copy ({speed:.2f} TB/s)"
        return f"{what}. At the right: PyTorch's time / ours"
    return "right of 1: backnorm is faster; measured side by side in one run"


def _rows(axes: Any, op: str, lines: Sequence[dict[str, Any]]) -> None:
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_yticks(range(len(lines)), [label(op, line["sample"]) for line in lines])
    axes.tick_params(axis="both", length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    for y in range(len(lines)):
        axes.axhline(y, color="#f0f2f5", linewidth=0.8, zorder=0)


def _draw_shares(axes: Any, op: str, lines: Sequence[dict[str, Any]], peers: list[str], last: bool) -> None:
    _rows(axes, op, lines)
    axes.set_xlim(0, 1)
    ticks = [0, 0.25, 0.5, 0.75, 1]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks] if last else [""] * len(ticks))
    for tick in ticks:
        axes.axvline(tick, color=_INK if tick == 1 else _FAINT, linewidth=1.1 if tick == 1 else 0.7, zorder=0)
    for y, line in enumerate(lines):
        shares = {"ours": line["share"]}
        shares |= {peer: line["share"] / value for peer in peers if (value := ratio(line, peer)) is not None}
        slower = shares["torch"] <= shares["ours"]
        pair = sorted((shares["torch"], shares["ours"]))
        axes.plot(
            pair, [y, y], color="#a9c5ee" if slower else "#eab3ad", linewidth=3.2, solid_capstyle="butt", zorder=1
        )
        for name in reversed(list(shares)):
            color, marker, filled = _LOOKS[name]
            axes.plot(
                shares[name], y, marker=marker, markersize=5 if marker == "o" else 4.2, linestyle="", color=color,
                markerfacecolor=color if filled else "white", markeredgewidth=1.1, zorder=3 if filled else 2,
                clip_on=False,
            )  # fmt: skip
        text = f"{line['ratio']:.1f}×" if line["ratio"] >= 1.05 else f"{line['ratio']:.2f}×"
        axes.text(
            1.075, y, text, va="center", ha="right", color=_INK if line["ratio"] >= 1 else "#b3261e", fontsize=7.5
        )
    if last:
        axes.set_xlabel("bytes that must move once / (time × a copy's bandwidth)", labelpad=3)


def _draw_ratios(axes: Any, op: str, lines: Sequence[dict[str, Any]], limits: tuple[float, float], last: bool) -> None:
    _rows(axes, op, lines)
    axes.set_xscale("log", base=2)
    axes.set_xlim(*limits)
    ticks = [tick for tick in (0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64) if limits[0] < tick < limits[1]]
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks] if last else [""] * len(ticks))
    axes.minorticks_off()
    for tick in ticks:
        axes.axvline(tick, color=_INK if tick == 1 else _FAINT, linewidth=1.1 if tick == 1 else 0.7, zorder=0)
    for y, line in enumerate(lines):
        values = list(line["ratios"].values())
        axes.plot([min(values), max(values)], [y, y], color="#dfe3e8", linewidth=3.2, solid_capstyle="butt", zorder=1)
        for dtype, value in line["ratios"].items():
            color, marker = _DTYPES[dtype]
            axes.plot(
                value,
                y,
                marker=marker,
                markersize=5 if marker == "o" else 4.2,
                linestyle="",
                color=color,
                zorder=3,
                clip_on=False,
            )
    if last:
        axes.set_xlabel("PyTorch's time / backnorm's, logarithmic", labelpad=3)


def _legend(figure: Any, results: Results, height: float) -> None:
    from matplotlib.lines import Line2D

    handles = []
    if results.on_gpu:
        for name in ("ours", *results.peers):
            color, marker, filled = _LOOKS[name]
            handles.append(
                Line2D([], [], marker=marker, linestyle="", color=color, label=_NAMES[name], markersize=5,
                       markerfacecolor=color if filled else "white", markeredgewidth=1.1)
            )  # fmt: skip
    else:
        for name in results.dtypes:
            color, marker = _DTYPES[name]
            handles.append(Line2D([], [], marker=marker, linestyle="", color=color, label=name, markersize=5))
    figure.legend(
        handles=handles, loc="center right", bbox_to_anchor=(0.985, 1 - 0.2 / height), ncols=len(handles),
        frameon=False, handletextpad=0.1, columnspacing=1.2, fontsize=8.5,
    )  # fmt: skip


def figure_paths(files: Sequence[str], output: str) -> list[str]:
    """Where the figures of the files go: one file's to `output`, several into the folder `output`."""
    if len(files) == 1 and not os.path.isdir(output):
        return [output]
    return [os.path.join(output, os.path.splitext(os.path.basename(file))[0] + ".svg") for file in files]
