"""The repository keeps its own promises."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from backnorm import document
from backnorm.bench import geometric_mean
from backnorm.ops import OPS

ROOT = Path(__file__).parent.parent


def test_the_operator_page_is_fresh() -> None:
    assert (ROOT / "docs" / "operators.md").read_text(encoding="utf-8") == document.render(), "run `make docs`"


def test_the_freshness_check_notices_a_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "operators.md"
    assert document.main([str(page)]) == 0
    assert document.main(["--check", str(page)]) == 0
    page.write_text(page.read_text(encoding="utf-8").replace("161001", "161009"), encoding="utf-8")
    assert document.main(["--check", str(page)]) == 1
    assert "make docs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "README.zh-CN.md",
        "docs/design.md",
        "docs/decisions.md",
        "docs/math.md",
        "docs/performance.md",
        "docs/sdk.md",
        "docs/torch.md",
    ],
)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        assert ((ROOT / page).parent / target).exists(), target


def test_the_h200s_single_rows_are_those_of_the_results() -> None:
    lines = [json.loads(line) for line in (ROOT / "benchmarks/results/h200.jsonl").read_text().splitlines()[1:]]
    letters = {"layer_norm_backward": "LN", "group_norm_backward": "GN", "batch_norm_backward_reduce": "BN"}
    results = {}
    for line in lines:
        shape = re.sub(r"rows|_groups\d+|x1(?=_pixels)", "", line["sample"].replace("_cols", "x"))
        if line["dtype"] == "bfloat16":
            results[f"{letters[line['op']]} {shape}"] = line
    results["BN 65536x512"] = results["BN 65536x512_pixels"]  # rows without an image: both at once
    above, seen = ["", ""], 0
    for text in (ROOT / "docs" / "performance.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in text.split("|")[1:-1]]
        if len(cells) != 8 or not re.fullmatch(r"[\d.]+", cells[1]):
            continue
        for side in (0, 1):
            name, time, share, ratios = cells[4 * side : 4 * side + 4]
            above[side] = f"{above[side]}_pixels" if name == "same, pixels" else name
            result, seen = results[above[side]], seen + 1
            shown = [time, *ratios.split(", "), *share.split()[:1]]
            measured = [result[key] for key in ("ours_us", "ratio", "compile_ratio", "share")]
            for number, value in zip(shown, measured):
                digits = len(number.partition(".")[2])
                assert float(number) == pytest.approx(value, abs=0.501 * 10**-digits), (above[side], shown, measured)
    assert seen == 26


def test_both_readmes_show_the_same_code() -> None:
    def blocks(page: str) -> list[str]:
        found = re.findall(r"```.*?```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
        return [re.sub(r" *#.*", "", block) for block in found]

    assert blocks("README.zh-CN.md") == blocks("README.md")
    assert len(blocks("README.md")) == 5


def test_what_is_said_of_all_the_h200s_rows_is_so() -> None:
    lines = [json.loads(line) for line in (ROOT / "benchmarks/results/h200.jsonl").read_text().splitlines()[1:]]
    page = " ".join((ROOT / "docs" / "performance.md").read_text(encoding="utf-8").split())
    assert f"(all rows together: {geometric_mean([line['ratio'] for line in lines]):.1f})" in page
    assert f"None of the {len(lines)} rows is slower than PyTorch's kernels, nor than PyTorch called from" in page
    assert all(line["ratio"] >= 1 and line["ours_eager_us"] <= line["torch_eager_us"] for line in lines)
    assert f"a call of ours takes {min(line['ours_eager_us'] for line in lines):.0f} microseconds at least" in page
    compiled = [line for line in lines if "compile_ratio" in line]
    (slower,) = (line for line in compiled if line["compile_ratio"] < 1)
    times = f"{slower['ours_us']:.1f} against {slower['compile_us']:.1f}"
    assert f"one of the {len(compiled)} rows in bfloat16, BatchNorm of {slower['sample']} ({times})" in page
    share = {line["sample"]: f"{line['share']:.2f}" for line in lines if line["dtype"] == "float32"}
    rows = f"({share['rows16384_cols1024']} and {share['rows8192_cols4096']} of 0.85;"
    assert f"LayerNorm of 1024 and 4096 columns {rows}" in page
    assert f"BatchNorm's pixels of 32x64x12544 ({share['32x64x12544_pixels']} of 0.90)" in page
    assert f"pixels of 65536 elements ({share['16x128x65536_groups32_pixels']} of 0.60)" in page
    large = [share[f"1x128x1048576_groups32{pixels}"] for pixels in ("", "_pixels")]
    assert f"both layouts of 1048576 ({large[0]} and {large[1]})" in page


@pytest.mark.parametrize("device", ["cpu", "cpu_first", "cpu_second", "xeon", "cascadelake", "epyc", "avx2", "h200"])
def test_the_table_of_speed_is_that_of_the_results(device: str) -> None:
    _, *results = [json.loads(line) for line in (ROOT / f"benchmarks/results/{device}.jsonl").read_text().splitlines()]
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for op in OPS:
        cells = []
        for dtype in ("float32", "bfloat16", "float16"):
            ratios = [line["ratio"] for line in results if (line["op"], line["dtype"]) == (op, dtype)]
            cells.append(f"{geometric_mean(ratios):.2f}, {min(ratios):.2f}")
        assert " | ".join(cells) in page, (op, cells)


@pytest.mark.parametrize("example", ["arrays.py", "two_phase.py"])
def test_examples_run(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
    assert capsys.readouterr().out


TORCHRUN = ("-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nproc-per-node=2")


@pytest.mark.parametrize(
    ("start", "example"), [((), "train_char_transformer.py"), (TORCHRUN, "train_convnet_sync_batch_norm.py")]
)
def test_training_examples_have_the_same_losses_as_torch(start: tuple[str, ...], example: str) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, *start, str(ROOT / "examples" / example), "--steps", "4"]
    output = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True).stdout
    rows = re.findall(r"^ +(\d+) +(\d+\.\d+) +(\d+\.\d+)$", output, re.MULTILINE)
    assert len(rows) == 4, output
    for _, torchs, ours in rows:
        assert abs(float(torchs) - float(ours)) <= 2e-4
    assert re.search(r"calls: \{'backnorm': [1-9]", output)


def test_every_example_is_run() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    assert all(example.name in here for example in (ROOT / "examples").glob("*.py"))
