"""SyncBatchNorm on 2, 3 and 4 gloo processes: the float64 truth of the joined batch, and what happens when one dies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)


def _start(check: str, ranks: int, folder: Path) -> list[subprocess.Popen[str]]:
    script = Path(__file__).parent / "sync_batch_norm_rank.py"
    return [
        subprocess.Popen(
            [sys.executable, str(script), check, str(folder / "store"), str(rank), str(ranks)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def _outputs(processes: list[subprocess.Popen[str]]) -> list[str]:
    try:
        return [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_processes_together_equal_one_with_the_joined_batch(tmp_path: Path) -> None:
    processes = _start("everything", 4, tmp_path)
    outputs = _outputs(processes)
    assert [process.returncode for process in processes] == [0] * 4, "\n".join(outputs)


def test_a_rank_that_dies_is_an_error_for_the_others_and_no_hang(tmp_path: Path) -> None:
    processes = _start("a_rank_dies", 3, tmp_path)
    outputs = _outputs(processes)
    assert [process.returncode for process in processes] == [0] * 3, "\n".join(outputs)
    assert all("told after" in output for i, output in enumerate(outputs) if i != 1), outputs
