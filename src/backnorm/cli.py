"""The command line: one function a command."""

from __future__ import annotations

import argparse
import glob
import io
import itertools
import os
import platform
import sys
import time
from typing import Any

import numpy as np

from . import __version__, functional
from .backends import BACKENDS
from .datatypes import BF16, F16, F32, NUMPY
from .ops import OPS
from .products import DEFAULT_PRODUCT, PRODUCTS, Support
from .spec import OpSpec, Param
from .status import AclnnError
from .threads import get_num_threads


class UserError(Exception):
    """A mistake to be told in one line."""


def main(argv: list[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without our signs still gets a table
    arguments = _parser().parse_args(argv)
    try:
        code = int(arguments.command(arguments))
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"backnorm: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"backnorm: cannot write the output: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="backnorm",
        description="Backward passes of LayerNorm, GroupNorm and BatchNorm-reduce under the aclnn contract.",
    )
    parser.add_argument("--version", action="version", version=f"backnorm {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="run the example call of each operator and compare with golden numbers")
    demo.set_defaults(command=_demo)

    run = commands.add_parser(
        "run",
        help="compute an operator from a .npz file into another",
        description="Compute an operator from the arrays of a .npz file into another.",
        epilog=_run_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("op", metavar="OP", choices=list(OPS), help=", ".join(OPS))
    run.add_argument("inputs", metavar="INPUTS.npz", help="the operator's arguments, by name")
    run.add_argument("-o", "--output", metavar="OUTPUTS.npz", required=True, help="where the results go")
    run.add_argument("--product", default="Any", help="apply the rules of one product (default: %(default)s)")
    run.set_defaults(command=_run)

    bench = commands.add_parser("bench", help="measure speed beside PyTorch's")
    bench.add_argument(
        "--device", choices=list(BACKENDS), default="cpu", help="where to measure (default: %(default)s)"
    )
    bench.add_argument(
        "--against", default="torch", metavar="PEERS",
        help="whom to measure against, with commas between them: torch (always measured), and on a GPU also compile"
        " (torch.compile of the gradients written out) and liger (default: %(default)s)",
    )  # fmt: skip
    bench.add_argument("--op", choices=list(OPS), action="append", help="an operator; may be repeated (default: all)")
    bench.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], action="append", help="likewise")
    bench.add_argument("--odd", type=int, default=10, metavar="N", help="shapes drawn at random (default: %(default)s)")
    bench.add_argument(
        "--seconds", type=float, default=1.5, help="for each line of the table, on a CPU (default: %(default)s)"
    )
    bench.add_argument("-o", "--output", metavar="RESULTS.jsonl", help="also write the measurements to a file")
    bench.set_defaults(command=_bench)

    report = commands.add_parser(
        "report",
        help="summarize recorded measurements, and draw them",
        description="Print a summary of files that `backnorm bench -o` wrote, and draw a figure of each.",
    )
    report.add_argument(
        "files", metavar="RESULTS.jsonl", nargs="*", help="measurements (default: benchmarks/results/*.jsonl)"
    )
    report.add_argument(
        "-o", "--output", metavar="FIGURE",
        help="draw: a file (.svg, .png, .pdf) for one RESULTS.jsonl, or a folder for an .svg of each",
    )  # fmt: skip
    report.set_defaults(command=_report)

    warmup = commands.add_parser("warmup", help="compile every CPU kernel now, so that no later call has to wait")
    warmup.set_defaults(command=_warmup)

    sdk = commands.add_parser(
        "sdk",
        help="build the home that C and C++ programs are compiled and linked against",
        description="Build, or find as it was built before, a folder with headers (include/) and libraries (lib64/) for"
        " C and C++ programs of the aclnn interface, and print its path as the last line. Needs cffi"
        " (pip install 'backnorm[sdk]'), a C compiler, and the headers and shared library of this Python.",
        epilog="then: export ASCEND_CUSTOM_PATH=$(backnorm sdk), and build with CMake as for the real one",
    )
    sdk.add_argument("directory", metavar="DIR", nargs="?", help="where to build it (default: in the user's cache)")
    sdk.set_defaults(command=_sdk)

    info = commands.add_parser("info", help="list the version, devices, products and supported data types")
    info.set_defaults(command=_info)
    return parser


def _run_help() -> str:
    lines = ["arrays in INPUTS.npz (optional ones in brackets):"]
    for op in OPS.values():
        words = " ".join(f"[{p.array_name}]" if _may_be_left_out(p) else p.array_name for p in op.inputs)
        lines.append(f"  {op.name}:\n    {words}")
    lines.append("bfloat16 arrays are stored as NumPy stores them, as two raw bytes an element ('V2').")
    return "\n".join(lines)


def _may_be_left_out(param: Param) -> bool:
    return param.optional or param.kind in ("bool", "bool_array")


# --- demo -------------------------------------------------------------------------------------------------------------


def _demo(arguments: argparse.Namespace) -> int:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from .demo import run_demo

    try:
        lines = run_demo()
    except RuntimeError as error:
        raise UserError(f"the demo cannot run: {error}") from None
    for operator, group in itertools.groupby(lines, key=lambda line: line.operator):
        table = Table(
            title=operator,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for column in ("output", "door", "result", "golden", ""):
            table.add_column(column)
        for line in group:
            verdict = "[green]ok[/]" if line.passed else "[bold red]MISMATCH[/]"
            table.add_row(line.output, line.door, _short(line.result), _short(line.golden), verdict)
        Console().print(table, "")
    failed = sum(not line.passed for line in lines)
    print(f"{len(lines) - failed} of {len(lines)} outputs match.")
    return 1 if failed else 0


def _short(array: Any) -> str:
    """The numbers of a small array; the largest magnitude of a longer one."""
    flat = np.asarray(array, np.float64).ravel()
    if flat.size > 6:
        return f"{flat.size} values, |max| {np.abs(flat).max():.2g}"
    return " ".join(f"{value:.6g}" for value in flat)


# --- run --------------------------------------------------------------------------------------------------------------


def _run(arguments: argparse.Namespace) -> int:
    op = OPS[arguments.op]
    values = _load(op, arguments.inputs)
    try:
        results = getattr(functional, op.name)(**values, product=arguments.product)
    except (AclnnError, TypeError) as error:
        status = f" (status {int(error.status)})" if isinstance(error, AclnnError) else ""
        raise UserError(f"{error}{status}") from None
    outputs = {p.array_name: result for p, result in zip(op.outputs, results) if result is not None}
    try:
        _save(arguments.output, outputs)
    except OSError as error:
        raise UserError(f"cannot write {arguments.output!r}: {error.strerror}") from None
    for name, result in outputs.items():
        print(f"{name}: {result.dtype.name} {list(result.shape)}")
    print(f"written to {arguments.output!r}")
    return 0


def _save(path: str, arrays: dict[str, Any]) -> None:
    """Write the file wholly or not at all; it may be the one the inputs came from."""
    packed = io.BytesIO()
    np.savez(packed, **arrays)
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.path.isfile(target):  # a device or a pipe
        with open(target, "wb") as file:
            file.write(packed.getbuffer())
        return
    partial = f"{target}.{os.getpid()}.part"
    try:
        with open(partial, "wb") as file:
            file.write(packed.getbuffer())
        os.replace(partial, target)
    except OSError:
        if os.path.exists(partial):
            os.remove(partial)
        raise


def _load(op: OpSpec, path: str) -> dict[str, Any]:
    """The operator's arguments from a file of plain arrays; pickles are refused."""
    words = [param.array_name for param in op.inputs]
    values = {}
    try:
        with open(path, "rb") as opened:
            file = np.load(opened, allow_pickle=False)
            if isinstance(file, np.ndarray):
                raise UserError(f"{path!r} holds a single array; expected a .npz file with {', '.join(words)}")
            unknown = sorted(set(file.files) - set(words))
            if unknown:
                names = ", ".join(map(repr, unknown))
                raise UserError(f"{path!r}: no such argument of {op.name}: {names}; it takes {', '.join(words)}")
            for param in op.inputs:
                if param.array_name in file.files:
                    values[param.array_name] = _argument(param, file[param.array_name], path)
                elif not _may_be_left_out(param):
                    raise UserError(f"{path!r}: {param.array_name} is missing; {op.name} takes {', '.join(words)}")
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path!r}: {error.strerror or error}") from None
    except Exception as error:  # a damaged or foreign file can break the readers in many ways
        raise UserError(f"{path!r} is no .npz file of plain arrays: {error or type(error).__name__}") from None
    if "gamma" in op.by_name:
        values.setdefault("weight", None)
    return values


def _argument(param: Param, array: Any, path: str) -> Any:
    if param.kind == "tensor":
        return array.view(NUMPY[BF16]) if array.dtype == np.dtype("V2") else array
    whole = param.kind in ("int64", "int_array")
    axes = 1 if param.kind.endswith("_array") else 0
    if array.ndim != axes or array.dtype.kind not in ("iu" if whole else "b"):
        what = f"{'a list of ' if axes else 'one '}{'integer' if whole else 'bool'}{'s' if axes else ''}"
        raise UserError(
            f"{path!r}: {param.array_name} must be {what}; got {array.dtype.name} of shape {list(array.shape)}"
        )
    return array.tolist()


# --- bench and warmup -------------------------------------------------------------------------------------------------


def _bench(arguments: argparse.Namespace) -> int:
    from . import bench

    try:
        import torch
    except ImportError:
        raise UserError("bench needs PyTorch to measure against: pip install 'backnorm[torch]'") from None
    from rich import box
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    ops, dtypes = arguments.op or list(OPS), arguments.dtype or list(bench.DTYPES)
    against = _peers(arguments.against, arguments.device)
    if arguments.device == "cuda":
        if not torch.cuda.is_available():
            raise UserError("bench --device cuda needs a GPU that PyTorch can use")
        return _bench_cuda(ops, dtypes, against, arguments)
    bench.keep_freed_memory()
    torch.set_num_threads(get_num_threads())
    samples = [(op, name, sizes) for op in ops for name, sizes in bench.SAMPLES[op].items()]
    samples += [odd for odd in bench.odd_samples(np.random.default_rng(), arguments.odd) if odd[0] in ops]
    work = [(op, name, sizes, dtype) for op, name, sizes in samples for dtype in dtypes]
    console = Console(stderr=True)
    results = [
        bench.measure(*line, seconds=arguments.seconds)
        for line in track(work, "measuring", console=console, transient=True)
    ]
    table = Table(title=f"CPU, {get_num_threads()} threads, PyTorch {torch.__version__}", box=box.SIMPLE_HEAD)
    for column in ("operator", "sample", "dtype", "ours ms", "torch ms", "ratio", "GB/s", "of probe"):
        table.add_column(column, justify="right" if "s" in column[-2:] and column != "dtype" else "left", no_wrap=True)
    for result in sorted(results, key=lambda result: (ops.index(result.op), dtypes.index(result.dtype))):
        table.add_row(
            OPS[result.op].folder, result.sample, result.dtype, f"{result.ours_ms:.3f}", f"{result.torch_ms:.3f}",
            f"{result.ratio:.2f}", f"{result.gb_s:.1f}", f"{result.share:.2f}",
        )  # fmt: skip
    Console(width=110).print(table)
    for op in ops:
        for dtype in dtypes:
            ratios = [result.ratio for result in results if (result.op, result.dtype) == (op, dtype)]
            print(f"{op} {dtype}: geometric mean {bench.geometric_mean(ratios):.2f}, worst {min(ratios):.2f}")
    if arguments.output:
        bench.record(results, arguments.output)
    return 0


def _peers(text: str, device: str) -> list[str]:
    """The peers beside torch that can be measured here."""
    from .bench_peers import PEERS, missing

    known = PEERS if device == "cuda" else PEERS[:1]
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise UserError(f"--against must be of {', '.join(known)} with --device {device}; got {name!r}")
    others = []
    for name in dict.fromkeys(names):
        why = missing(name)
        if why:
            print(f"backnorm: {why}", file=sys.stderr)
        elif name != "torch":
            others.append(name)
    return others


def _bench_cuda(ops: list[str], dtypes: list[str], against: list[str], arguments: argparse.Namespace) -> int:
    from rich import box
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from . import bench, bench_cuda

    bandwidth = bench_cuda.copy_bandwidth()
    work = [(*sample, dtype) for sample in bench_cuda.work(ops, arguments.odd) for dtype in dtypes]
    console = Console(stderr=True)
    results = [
        bench_cuda.measure(*line, bandwidth, tuple(against))
        for line in track(work, "measuring", console=console, transient=True)
    ]
    table = Table(
        title=f"GPU, a copy moves {bandwidth / 1e12:.2f} TB/s; microseconds of the kernels, and as called one by one",
        box=box.SIMPLE_HEAD,
    )
    words = ["operator", "sample", "dtype"]
    peers = [text for name in against for text in (name, "ratio")]
    eager = [f"{name} called" for name in ("torch", *against)]
    for column in (*words, "limit", "ours", "share", "torch", "ratio", *peers, "ours called", *eager):
        table.add_column(column, justify="left" if column in words else "right", no_wrap=column in words)
    for r in sorted(results, key=lambda r: (ops.index(r.op), dtypes.index(r.dtype))):
        texts = [f"{r.limit_us:.1f}", f"{r.ours_us:.1f}", f"{r.share:.2f}", f"{r.torch_us:.1f}", f"{r.ratio:.2f}"]
        times = [r.peers.get(name) for name in against]
        for time_ in times:
            texts += ["-", "-"] if time_ is None else [f"{time_[0]:.1f}", f"{time_[0] / r.ours_us:.2f}"]
        texts += [f"{r.ours_eager_us:.1f}", f"{r.torch_eager_us:.1f}"]
        texts += ["-" if time_ is None else f"{time_[1]:.1f}" for time_ in times]
        table.add_row(OPS[r.op].folder, r.sample, r.dtype, *texts)
    Console(width=130 + 24 * len(against)).print(table)
    for r in results:
        for name, why in r.refusals.items():
            print(f"{name} does not do {r.op} {r.sample} {r.dtype}: {why}")
    for op in ops:
        for dtype in dtypes:
            some = [r for r in results if (r.op, r.dtype) == (op, dtype)]
            for name in ("torch", *against):
                ratios = [r.ratio if name == "torch" else r.peers[name][0] / r.ours_us for r in some
                          if name == "torch" or name in r.peers]  # fmt: skip
                if ratios:
                    mean, worst = bench.geometric_mean(ratios), min(ratios)
                    print(f"{op} {dtype}: {name}'s time over ours: geometric mean {mean:.2f}, worst {worst:.2f}")
    if arguments.output:
        bench_cuda.record(results, bandwidth, arguments.output)
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from . import report

    files = arguments.files or sorted(glob.glob(os.path.join("benchmarks", "results", "*.jsonl")))
    if not files:
        raise UserError(
            "report needs a file of measurements: none was named, and there is no benchmarks/results/*.jsonl"
        )
    try:
        results = [report.read(path) for path in files]
    except report.BadResults as error:
        raise UserError(str(error)) from None
    for one in results:
        table = Table(
            title=report.title(one), title_justify="left", caption=report.legend(one), caption_justify="left",
            box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0),
        )  # fmt: skip
        for column in report.COLUMNS:
            left = column in ("operator", "dtype", "against", "at")
            table.add_column(column, justify="left" if left else "right", no_wrap=True)
        for row in report.summary(one):
            table.add_row(*row)
        Console(width=max(120, Console().width)).print(table, "")
    if arguments.output is None:
        return 0
    if len(files) > 1 and not os.path.isdir(arguments.output):
        raise UserError(f"-o must be a folder for the figures of {len(files)} files; got {arguments.output!r}")
    for one, path in zip(results, report.figure_paths(files, arguments.output)):
        ending = os.path.splitext(path)[1]
        if ending not in (".svg", ".png", ".pdf"):
            raise UserError(f"-o must end in .svg, .png or .pdf, or be a folder; got {path!r}")
        try:
            report.draw(one, path)
        except ImportError as error:
            raise UserError(f"drawing needs {error.name}: pip install 'backnorm[report]'") from None
        except OSError as error:
            raise UserError(f"cannot write {path!r}: {error.strerror}") from None
        print(f"drawn to {path!r}")
    return 0


def _warmup(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import track

    from .warmup import compile_one, work

    begun = time.perf_counter()
    for item in track(list(work()), "compiling", console=Console(stderr=True)):
        compile_one(item)
    print(f"compiled and cached in {time.perf_counter() - begun:.1f} s")
    return 0


# --- sdk --------------------------------------------------------------------------------------------------------------


def _sdk(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from .sdk.build import CannotBuild, build_home

    try:
        home, seconds = build_home(Path(arguments.directory) if arguments.directory else None)
    except CannotBuild as error:
        raise UserError(str(error)) from None
    state = f"built in {seconds:.1f} s" if seconds else "up to date"
    print(
        f"backnorm: {state}; headers in include/, libraries in lib64/, `. {home}/set_env.sh` for a shell",
        file=sys.stderr,
    )
    print(home)
    return 0


# --- info -------------------------------------------------------------------------------------------------------------


def _info(arguments: argparse.Namespace) -> int:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    print(f"backnorm {__version__} (Python {platform.python_version()}, NumPy {np.__version__})")
    print(f"devices: {', '.join(BACKENDS)} ({get_num_threads()} threads, {platform.machine()})")
    device = os.environ.get("BACKNORM_DEVICE") or "cpu"
    print(f"two-phase calls: product {DEFAULT_PRODUCT} by default (BACKNORM_SOC), device {device} (BACKNORM_DEVICE)")
    table = Table(title="Data types by product and operator", box=box.SIMPLE_HEAD, show_edge=False)
    for column in ("product", "series", *(op.folder for op in OPS.values())):
        table.add_column(column)
    for product in PRODUCTS.values():
        cells = [_types(product.operators.get(op.name)) for op in OPS.values()]
        table.add_row(product.name, product.series, *cells)
    Console().print(table)
    print("mixed: float32 statistics and gamma beside 16-bit data")
    return 0


def _types(support: Support | None) -> str:
    if support is None:
        return "-"
    short = {F32: "f32", F16: "f16", BF16: "bf16"}
    return " ".join([*(short[dtype] for dtype in support.dtypes), *(["mixed"] if support.mixed else [])])


if __name__ == "__main__":
    sys.exit(main())
