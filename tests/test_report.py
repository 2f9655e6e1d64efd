"""`backnorm report`, the peers of the GPU's bench, and the figures in docs/."""

from __future__ import annotations

import html
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backnorm import bench, bench_cuda, bench_peers, cli, functional, report
from backnorm.ops import OPS

ROOT = Path(__file__).parent.parent
RESULTS = {device: ROOT / f"benchmarks/results/{device}.jsonl" for device in ("h200", "cpu")}


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def shown(results: report.Results) -> list[str]:
    """The labels a figure must have: bfloat16's on a GPU, all on a CPU."""
    lines = [line for line in results.lines if not results.on_gpu or line["dtype"] == "bfloat16"]
    return [report.label(line["op"], line["sample"]) for line in lines]


@pytest.mark.parametrize("device", RESULTS)
def test_the_figures_in_docs_are_of_the_recorded_results(device: str) -> None:
    text = html.unescape((ROOT / f"docs/figures/{device}.svg").read_text(encoding="utf-8"))
    results = report.read(str(RESULTS[device]))
    for name in shown(results):
        assert f"<!-- {name} -->" in text, f"run `make report`: {name} is not in the figure"
    if results.on_gpu:
        ratios = [line["ratio"] for line in results.lines if line["dtype"] == "bfloat16"]
        written = [f"{ratio:.1f}×" if ratio >= 1.05 else f"{ratio:.2f}×" for ratio in ratios]
        drawn = [line.strip()[5:-4] for line in text.splitlines() if line.strip().endswith("× -->")]
        assert sorted(drawn) == sorted(written), "run `make report`"


@pytest.mark.parametrize("device", RESULTS)
def test_a_figure_is_the_same_file_every_time(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one.svg", "two.svg"):
        assert run("report", RESULTS[device], "-o", tmp_path / name) == 0
    one, two = ((tmp_path / name).read_bytes() for name in ("one.svg", "two.svg"))
    assert one == two
    assert b"<dc:date>" not in one
    assert "drawn to" in capsys.readouterr().out


def test_the_summary_says_what_the_files_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("report", RESULTS["h200"]) == 0
    text = capsys.readouterr().out
    results = report.read(str(RESULTS["h200"]))
    assert "NVIDIA H200" in text
    for op in OPS:
        ratios = [line["ratio"] for line in results.of(op, "bfloat16")]
        row = next(line for line in text.splitlines() if OPS[op].folder in line and "bfloat16" in line)
        assert f" {bench.geometric_mean(ratios):.2f} " in row
        assert f" {min(ratios):.2f} " in row


def test_other_peers_are_drawn_and_summarized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine, *lines = RESULTS["h200"].read_text().splitlines()
    more = [{**json.loads(line), "compile_ratio": 1.25, "liger_ratio": 2.5} for line in lines]
    more[0].pop("liger_ratio")  # a shape it cannot do
    (tmp_path / "more.jsonl").write_text("\n".join([machine, *map(json.dumps, more)]))
    assert run("report", tmp_path / "more.jsonl", "-o", tmp_path / "more.svg") == 0
    text = capsys.readouterr().out
    assert text.count("torch.compile") == text.count("Liger") == 9
    svg = (tmp_path / "more.svg").read_text()
    assert "<!-- torch.compile -->" in svg
    assert "<!-- Liger -->" in svg


def test_several_files_are_drawn_into_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert run("report", "-o", tmp_path) == 0
    results = (ROOT / "benchmarks/results").glob("*.jsonl")
    assert sorted(path.stem for path in tmp_path.glob("*.svg")) == sorted(path.stem for path in results)


def test_what_cannot_be_reported_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    good = RESULTS["cpu"].read_text()
    machine, first, *_ = good.splitlines()
    files = {
        "empty.jsonl": "", "words.jsonl": "hello\n", "machine.jsonl": machine, "list.jsonl": f"{machine}\n[1]\n",
        "keys.jsonl": f'{machine}\n{{"op": "layer_norm_backward"}}\n', "good.jsonl": good, "binary.jsonl": "\udcff",
        "op.jsonl": f"{machine}\n{first.replace('layer_norm_backward', 'softmax')}",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    cases: list[tuple[list[Any], str]] = [
        ([], "no benchmarks/results"), (["missing.jsonl"], "cannot read"), (["empty.jsonl"], "no file of measurements"),
        (["words.jsonl"], "no file of measurements"), (["machine.jsonl"], "no measurements"),
        (["list.jsonl"], "line 2"), (["keys.jsonl"], "sample, dtype, ratio, share missing"),
        (["binary.jsonl"], "no file of measurements"), (["op.jsonl"], "unknown operator"),
        (["good.jsonl", "-o", "x.docx"], "must end in .svg"), (["good.jsonl", "-o", "no/such.svg"], "cannot write"),
        (["good.jsonl", "good.jsonl", "-o", "x.svg"], "must be a folder"),
    ]  # fmt: skip
    for arguments, words in cases:
        assert run("report", *arguments) == 2, arguments
        error = capsys.readouterr().err
        assert words in error, (arguments, error)
        assert error.count("\n") == 1
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("report", "good.jsonl") == 0
    assert run("report", "good.jsonl", "-o", "x.svg") == 2
    assert "drawing needs matplotlib: pip install 'backnorm[report]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("op", "sample", "expected"),
    [
        ("layer_norm_backward", "rows4096_cols768", "4096×768"),
        ("layer_norm_backward", "gpt2_rows4k_cols768", "gpt2 4k×768"),
        ("layer_norm_backward", "one_row_cols18m", "one row 18m columns"),
        ("layer_norm_backward", "odd_153x9525", "153×9525, odd"),
        ("group_norm_backward", "2x320x4096_groups32_pixels", "2×320×4096, 32 groups, channels-last"),
        ("group_norm_backward", "odd_7x120x3364x1x4", "7×120×3364, 4 groups, channels-last, odd"),
        ("group_norm_backward", "odd_236x31x324x0x1", "236×31×324, 1 group, odd"),
        ("batch_norm_backward_reduce", "odd_37x132x3025x0", "37×132×3025, odd"),
    ],
)
def test_samples_have_readable_names(op: str, sample: str, expected: str) -> None:
    assert report.label(op, sample) == expected


# --- the GPU bench's peers ---

SIZES: dict[str, bench.Sizes] = {
    "layer_norm_backward": {"rows": 5, "cols": 7},
    "group_norm_backward": {"N": 3, "C": 8, "HxW": 10, "group": 2, "pixels": 0},
    "batch_norm_backward_reduce": {"N": 3, "C": 8, "HxW": 10, "pixels": 0},
}


@pytest.mark.parametrize("pixels", [0, 1])
@pytest.mark.parametrize("op", OPS)
def test_the_gradients_written_out_are_the_gradients(op: str, pixels: int) -> None:
    """What torch.compile is given; uncompiled here."""
    torch.manual_seed(0)
    sizes = SIZES[op] | ({"pixels": pixels} if op != "layer_norm_backward" else {})
    tensors = bench.make_tensors(op, sizes, "float32")
    dy, x, mean, rstd, w = tensors
    if op == "layer_norm_backward":
        theirs = bench_peers.layer_norm(*tensors)
        ours: Any = functional.layer_norm_backward(dy, x, [7], mean, rstd, w)
    elif op == "group_norm_backward":
        theirs = bench_peers.group_norm(*tensors, sizes["group"])
        ours = functional.group_norm_backward(dy, x, mean, rstd, w, 3, 8, 10, 2)
    else:
        theirs = bench_peers.batch_norm_reduce(dy, x, mean, rstd)
        ours = functional.batch_norm_backward_reduce(dy, x, mean, rstd, w)
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs):
        assert mine.shape == other.shape
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)


def _pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose measurements are made up."""

    def measure(
        op: str, sample: str, sizes: Any, dtype: str, bandwidth: float, against: tuple[str, ...]
    ) -> bench_cuda.Result:
        result = bench_cuda.Result(op, sample, dtype, 10.0, 30.0, 5.0, 40.0, 60.0)
        for name in against:
            if "cols64" in sample:
                result.refusals[name] = "RuntimeError: too wide"
            else:
                result.peers[name] = (20.0, 50.0)
        return result

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Pretended GPU")
    monkeypatch.setattr(bench_cuda, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(bench_cuda, "measure", measure)


def test_bench_on_a_gpu_reports_every_peer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    _pretend(monkeypatch)
    where = tmp_path / "gpu.jsonl"
    assert run("bench", "--device", "cuda", "--against", "torch,compile", "--odd", 2, "-o", where) == 0
    text = capsys.readouterr().out
    assert "layer_norm_backward bfloat16: compile's time over ours: geometric mean 2.00, worst 2.00" in text
    assert "layer_norm_backward bfloat16: torch's time over ours: geometric mean 3.00, worst 3.00" in text
    assert "compile does not do layer_norm_backward rows1048576_cols64 bfloat16: RuntimeError: too wide" in text
    machine, first, *rest = [json.loads(line) for line in where.read_text().splitlines()]
    assert machine["device"] == "Pretended GPU"
    assert first | {"compile_us": 20.0, "compile_eager_us": 50.0, "compile_ratio": 2.0} == first
    assert (first["ratio"], first["share"], first["torch_us"], first["ours_eager_us"]) == (3.0, 0.5, 30.0, 40.0)
    assert any("compile_us" not in line for line in rest)
    assert run("report", where, "-o", tmp_path / "gpu.svg") == 0


def test_a_peer_that_is_not_installed_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _pretend(monkeypatch)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    arguments = ("--op", "batch_norm_backward_reduce", "--dtype", "float32", "--odd", 0)
    assert run("bench", "--device", "cuda", "--against", "torch,liger", *arguments) == 0
    told = capsys.readouterr()
    assert "liger-kernel is not installed (pip install liger-kernel); its column is left out" in told.err
    assert "liger" not in told.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--against", "apex"], "--against must be of torch with --device cpu; got 'apex'"),
        (["--against", "torch,compile"], "--against must be of torch with --device cpu; got 'compile'"),
        (["--device", "cuda", "--against", "torch,,"], "must be of torch, compile, liger with --device cuda; got ''"),
    ],
)
def test_an_unknown_peer_is_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", *arguments) == 2
    assert words in capsys.readouterr().err
