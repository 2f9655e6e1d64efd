"""BatchNorm's backward reduce on the CPU, for pixels (channels-last and 2-D): rows of all channels."""

from __future__ import annotations

from typing import Any

from .._native import kernel
from .._simd import load_one, store_one, words
from .._sums import add_columns, add_four_rows, add_row, clear
from .._views import PIXEL_ROWS
from .axes import offset


@kernel
def repeat_means() -> Any:
    """The means of a row of pixels."""

    def run(args: Any, task: Any) -> Any:
        mean, channels, together, table, size = words(args, 5)
        clear(table, size)
        for i in range(together):
            for c in range(channels):
                store_one(table + (i * channels + c) * 4, load_one(mean + c * 4))

    return run


@kernel
def pixel_sums(T: Any) -> Any:
    """Some chunks of the rows of a sample, or all of some samples, a task, into its own float64 sums of dy and of
    dy * (x - mean). They are float32 for PIXEL_ROWS rows at a time.
    """

    def run(args: Any, task: Any) -> Any:
        (
            dy, dy_h, x, x_h, means, partials, step, channels, together, pixels, samples, task_samples, chunks,
            task_chunks, ahead, fours, outer_axes,
        ) = words(args, 17)  # fmt: skip
        outer = args + 17 * 8
        tasks = (chunks + task_chunks - 1) // task_chunks
        cols, rows = channels * together, (pixels + together - 1) // together
        start, end = task // tasks * task_samples, min(samples, task // tasks * task_samples + task_samples)
        first, stop = task % tasks * task_chunks * PIXEL_ROWS, min(rows, (task % tasks + 1) * task_chunks * PIXEL_ROWS)
        sums, apart = partials + task * step, (cols + 15) // 16 * 128
        totals, left = sums + apart, PIXEL_ROWS
        clear(sums, 3 * apart)
        for sample in range(start, end):
            to_dy, to_x = offset(outer, outer_axes, sample)
            row = first
            while row < stop:
                d, p = dy + to_dy + row * dy_h, x + to_x + row * x_h
                if fours and left >= 4 and row + 4 < stop:
                    add_four_rows(T, d, dy_h, p, x_h, cols, means, None, sums, ahead)
                    row, left = row + 4, left - 4
                else:
                    n = (pixels - row * together) * channels if row + 1 == rows else cols
                    add_row(T, d, p, n, means, None, sums, ahead)
                    row, left = row + 1, left - 1
                if left == 0:
                    add_columns(sums, cols, totals, apart)
                    clear(sums, apart)
                    left = PIXEL_ROWS
        add_columns(sums, cols, totals, apart)

    return run
