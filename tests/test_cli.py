"""The command line, as a person would use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import backnorm
from backnorm import acl, bench, cli, demo, warmup
from backnorm.ops import OPS

RNG = np.random.default_rng(4)


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def layer_norm_file(path: Path, **changes: Any) -> dict[str, Any]:
    arrays: dict[str, Any] = {
        "grad_out": RNG.standard_normal((3, 8)).astype(np.float32),
        "input": RNG.standard_normal((3, 8)).astype(np.float32),
        "normalized_shape": np.array([8]),
        "mean": RNG.standard_normal((3, 1)).astype(np.float32),
        "rstd": RNG.standard_normal((3, 1)).astype(np.float32),
    }
    arrays.update(changes)
    arrays = {name: array for name, array in arrays.items() if array is not None}
    np.savez(path, **arrays)
    return arrays


def test_demo_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo") == 0
    text = capsys.readouterr().out
    assert "20 of 20 outputs match." in text
    for word in ("-1747.5", "155.849", "two phases", "arrays", "sumDyXmu"):
        assert word in text


def test_demo_fails_on_a_mismatch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = demo.run_demo()
    wrong = lines[0].result.copy()
    wrong[0] += 1e-3
    object.__setattr__(lines[0], "result", wrong)
    monkeypatch.setattr(demo, "run_demo", lambda: lines)
    assert run("demo") == 1
    assert "MISMATCH" in capsys.readouterr().out


def test_run_computes_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = layer_norm_file(tmp_path / "in.npz", output_mask=np.array([True, False, True]))
    assert run("run", "layer_norm_backward", tmp_path / "in.npz", "-o", tmp_path / "out.npz") == 0
    expected = backnorm.layer_norm_backward(**arrays)
    with np.load(tmp_path / "out.npz") as results:
        assert sorted(results.files) == ["grad_bias", "grad_input"]
        np.testing.assert_array_equal(results["grad_input"], expected[0])
        np.testing.assert_array_equal(results["grad_bias"], expected[2])
    assert "grad_input: float32 [3, 8]" in capsys.readouterr().out


def test_run_takes_bfloat16_scalars_and_switches(tmp_path: Path) -> None:
    x = RNG.standard_normal((2, 4, 3)).astype(ml_dtypes.bfloat16)
    statistics = RNG.standard_normal((2, 2)).astype(np.float32)
    np.savez(tmp_path / "gn.npz", grad_out=x, input=x, mean=statistics, rstd=statistics, N=2, C=4, HxW=3, group=2)
    assert run("run", "group_norm_backward", tmp_path / "gn.npz", "-o", tmp_path / "out.npz") == 0
    expected = backnorm.group_norm_backward(x, x, statistics, statistics, None, 2, 4, 3, 2)
    with np.load(tmp_path / "out.npz") as results:
        np.testing.assert_array_equal(results["grad_input"].view(ml_dtypes.bfloat16), expected[0])
        np.testing.assert_array_equal(results["grad_weight"], expected[1])
    channel = statistics.ravel()
    np.savez(tmp_path / "bn.npz", grad_out=x, input=x, mean=channel, invstd=channel, input_g=False)
    assert run("run", "batch_norm_backward_reduce", tmp_path / "bn.npz", "-o", tmp_path / "out.npz") == 0
    with np.load(tmp_path / "out.npz") as results:
        assert sorted(results.files) == ["grad_bias", "grad_weight"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mean": None}, "mean is missing"),
        ({"surplus": np.ones(1)}, "no such argument of layer_norm_backward: 'surplus'"),
        ({"mean": np.ones((4, 1), np.float32)}, "mean must hold one element for each row (3 elements); got 4"),
        ({"grad_out": np.ones((3, 8))}, "got float64 (status 161002)"),
        ({"normalized_shape": np.array(8)}, "normalized_shape must be a list of integers; got int64 of shape []"),
        ({"normalized_shape": np.array([8.0])}, "normalized_shape must be a list of integers; got float64"),
        ({"output_mask": np.array([1, 1, 1])}, "output_mask must be a list of bools; got int64"),
        ({"output_mask": np.array([True])}, "output_mask must have exactly 3 places; got 1"),
        ({"weight": np.array([{}], object)}, "is no .npz file of plain arrays"),
    ],
)
def test_run_explains_bad_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], words: str
) -> None:
    layer_norm_file(tmp_path / "in.npz", **changes)
    assert run("run", "layer_norm_backward", tmp_path / "in.npz", "-o", tmp_path / "out.npz") == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.startswith("backnorm: ")
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out.npz").exists()


def test_run_explains_what_it_cannot_read_or_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(source: Path, target: Path, words: str) -> None:
        assert run("run", "layer_norm_backward", source, "-o", target) == 2
        assert words in capsys.readouterr().err

    out = tmp_path / "out.npz"
    refuse(tmp_path / "missing.npz", out, "cannot read")
    refuse(tmp_path, out, "cannot read")
    (tmp_path / "junk.npz").write_bytes(b"junk")
    refuse(tmp_path / "junk.npz", out, "no .npz file")
    (tmp_path / "empty.npz").write_bytes(b"")
    refuse(tmp_path / "empty.npz", out, "no .npz file")
    np.save(tmp_path / "single.npy", np.ones(3))
    refuse(tmp_path / "single.npy", out, "single array")
    layer_norm_file(tmp_path / "in.npz")
    whole = (tmp_path / "in.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    refuse(tmp_path / "cut.npz", out, "no .npz file")
    refuse(tmp_path / "in.npz", tmp_path / "no" / "such" / "folder.npz", "cannot write")


def test_run_explains_damaged_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez_compressed(tmp_path / "in.npz", **layer_norm_file(tmp_path / "plain.npz"))
    whole = bytearray((tmp_path / "in.npz").read_bytes())
    for place in range(0, len(whole), 7):
        damaged = whole.copy()
        damaged[place] ^= 0xFF
        (tmp_path / "damaged.npz").write_bytes(damaged)
        assert run("run", "layer_norm_backward", tmp_path / "damaged.npz", "-o", tmp_path / "out.npz") in (0, 2)
        assert "Traceback" not in capsys.readouterr().err


def test_run_writes_wholly_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = layer_norm_file(tmp_path / "in.npz")
    before = (tmp_path / "in.npz").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    same = ("run", "layer_norm_backward", tmp_path / "in.npz", "-o", tmp_path / "in.npz")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert run(*same) == 2
    assert (tmp_path / "in.npz").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.npz"]
    assert run(*same) == 0  # over its own input
    with np.load(tmp_path / "in.npz") as results:
        np.testing.assert_array_equal(results["grad_input"], backnorm.layer_norm_backward(**arrays)[0])
    layer_norm_file(tmp_path / "in.npz")
    assert run("run", "layer_norm_backward", tmp_path / "in.npz", "-o", "/dev/null") == 0


def test_demo_tells_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for soc, words in (("Ascend310P", "operator must exist on the product"), ("junk", "BACKNORM_SOC must be")):
        monkeypatch.setenv("BACKNORM_SOC", soc)
        assert run("demo") == 2
        assert words in capsys.readouterr().err
        acl.finalize()


def test_a_terminal_without_our_signs_still_gets_a_table() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    for command in ("info", "demo"):
        done = subprocess.run([sys.executable, "-m", "backnorm", command], capture_output=True, env=environment)
        assert done.returncode == 0, done.stderr


def test_run_applies_the_rules_of_a_product(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half = np.ones((3, 8), ml_dtypes.bfloat16)
    layer_norm_file(tmp_path / "in.npz", grad_out=half, input=half)
    where = ("run", "layer_norm_backward", tmp_path / "in.npz", "-o", tmp_path / "out.npz")
    assert run(*where) == 0
    assert run(*where, "--product", "Ascend910") == 2
    assert "got bfloat16; allowed on" in capsys.readouterr().err
    assert run(*where, "--product", "Pentium") == 2
    assert "product must be" in capsys.readouterr().err


def test_info_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("info") == 0
    text = capsys.readouterr().out
    for word in (backnorm.__version__, "cpu", "Ascend910_93", "Ascend310B", "mixed", "layer_norm"):
        assert word in text


def test_warmup_compiles_and_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    every = list(warmup.work())
    assert len(every) > 60
    monkeypatch.setattr(warmup, "work", lambda: every[:2] + every[-2:])
    assert run("warmup") == 0
    assert "compiled and cached in" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bench_on_a_gpu_needs_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "--device", "cuda") != 0
    assert "bench --device cuda needs a GPU that PyTorch can use" in capsys.readouterr().err


def test_bench_prints_and_records(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small = {
        "layer_norm_backward": {"tiny": {"rows": 8, "cols": 32}},
        "group_norm_backward": {"tiny": {"N": 2, "C": 4, "HxW": 9, "group": 2, "pixels": 1}},
        "batch_norm_backward_reduce": {"tiny": {"N": 2, "C": 4, "HxW": 9, "pixels": 0}},
    }
    monkeypatch.setattr(bench, "SAMPLES", small)
    monkeypatch.setattr(bench, "keep_freed_memory", lambda: None)
    assert run("bench", "--seconds", 0, "--odd", 0, "--dtype", "bfloat16", "-o", tmp_path / "results.jsonl") == 0
    text = capsys.readouterr().out
    assert text.count("tiny") == 3
    assert text.count("geometric mean") == 3
    machine, *lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert machine["device"] == "cpu"
    assert {line["op"] for line in lines} == set(OPS)
    assert all(line["ratio"] > 0 and line["share"] > 0 for line in lines)


def test_odd_shapes_are_shapes() -> None:
    for op, _, sizes in bench.odd_samples(np.random.default_rng(0), 50):
        assert bench.bytes_moved(op, sizes, "float32") > 4e6
        if op == "group_norm_backward":
            assert sizes["C"] % sizes["group"] == 0


def test_help_names_every_argument(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["run", "--help"]):
        with pytest.raises(SystemExit) as done:
            run(*arguments)
        assert done.value.code == 0
    text = capsys.readouterr().out
    for op in OPS.values():
        assert all(param.array_name in text for param in op.inputs)


@pytest.mark.parametrize("arguments", [[], ["fly"], ["run"], ["run", "softmax", "a", "-o", "b"]])
def test_wrong_words_are_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        run(*arguments)
    assert done.value.code == 2
    assert "usage: backnorm" in capsys.readouterr().err


def test_the_module_and_the_version_work_from_a_shell() -> None:
    done = subprocess.run([sys.executable, "-m", "backnorm", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"backnorm {backnorm.__version__}"
