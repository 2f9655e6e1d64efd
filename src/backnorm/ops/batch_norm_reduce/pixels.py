"""BatchNorm's backward reduce on the CPU, for pixels (channels-last and 2-D): rows of all channels."""

from __future__ import annotations

from typing import Any

from .._native import kernel
from .._simd import load_one, prefetch, store_one, width, words
from .._sums import add_columns, add_four_rows, add_last_row, add_row, clear
from .._views import PAGE, PIXEL_ROWS
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
    dy * (x - mean). They are float32 for PIXEL_ROWS rows at a time, and then added up: `gradually`, those of some
    columns with every row, or all at once.
    """

    def run(args: Any, task: Any) -> Any:
        (
            dy, dy_h, x, x_h, means, partials, step, channels, together, pixels, samples, task_samples, chunks,
            task_chunks, ahead, fours, gradually, outer_axes,
        ) = words(args, 18)  # fmt: skip
        outer = args + 18 * 8
        tasks = (chunks + task_chunks - 1) // task_chunks
        cols, rows = channels * together, (pixels + together - 1) // together
        vectors, vector = (cols + 15) // 16, 16 * width(T)
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
                if ahead == 0 and d % PAGE < dy_h:  # no prefetcher looks past a page
                    prefetch(d + PAGE)
                    prefetch(p + PAGE)
                if gradually:
                    i = (PIXEL_ROWS - left) * vectors // PIXEL_ROWS
                    j = (PIXEL_ROWS - left + 1) * vectors // PIXEL_ROWS
                    add_row(T, d, p, i * 16, means, None, sums, ahead)
                    add_last_row(
                        T, d + i * vector, p + i * vector, min(cols, j * 16) - i * 16, means + i * 64, sums + i * 128,
                        totals + i * 128, apart, ahead,
                    )  # fmt: skip
                    add_row(
                        T, d + j * vector, p + j * vector, cols - j * 16, means + j * 64, None, sums + j * 128, ahead
                    )
                    row, left = row + 1, left - 1 if left > 1 else PIXEL_ROWS
                elif fours and left >= 4 and row + 4 < stop:
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
