"""The C home: what C and C++ programs see of it. Each test builds programs and runs them in processes of their own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from backnorm import cli
from backnorm.ops import OPS
from backnorm.products import PRODUCTS
from backnorm.sdk import bodies, build, headers
from backnorm.sdk.interface import ALL_FUNCTIONS
from backnorm.spec import ACLNN, C

from .c_driver import Case, render_driver
from .test_contract import call_aclnn, sentence, witnesses

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples" / "cpp"
STRICT = ["-Wall", "-Wextra", "-Werror"]


def need(tool: str) -> str:
    """The path of a tool; without it the test is skipped."""
    path = shutil.which(tool, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if path is None:
        pytest.skip(f"{tool} is not installed")
    return path


def run(
    command: Sequence[object], environment: Mapping[str, str] | None = None, code: int | None = 0
) -> subprocess.CompletedProcess[str]:
    """Run to the end (Valgrind takes three minutes on a quiet machine, eight on a busy and slower one); here, or with
    `environment` in nothing else."""
    result = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=1500, env=environment
    )
    assert code is None or result.returncode == code, f"{result.returncode}\n{result.stdout}\n{result.stderr}"
    return result


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        build._find_compiler(), build._find_libpython(), build._find_python_headers()
    except build.CannotBuild as error:
        pytest.skip(str(error))
    return build.build_home(tmp_path_factory.mktemp("sdk") / "a home")[0]


Compile = Callable[..., Path]


@pytest.fixture
def compile(home: Path, tmp_path: Path) -> Compile:
    """Builds a program from sources against the home."""

    def compile(*sources: Path | str, options: Sequence[str] = (), name: str = "program") -> Path:
        cpp = any(str(source).endswith(".cpp") for source in sources)
        compiler = need("g++" if cpp else "gcc")
        libraries = [home / "lib64" / f"lib{word}.so" for word in ("ascendcl", "nnopbase", "opapi")]
        include = [f"-I{home / 'include'}", f"-I{home / 'include' / 'aclnn'}", f"-I{HERE / 'c'}", f"-I{EXAMPLES}"]
        standard = "-std=c++11" if cpp else "-std=c11"
        rpath = f"-Wl,-rpath,{home / 'lib64'}"
        program = tmp_path / name
        run(
            [compiler, standard, "-O1", "-g", *STRICT, *include, *options, *sources, "-o", program, *libraries, rpath,
             "-pthread", "-lstdc++", "-ldl"]
        )  # fmt: skip
        return program

    return compile


# --- headers and names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", sorted(headers.render_headers()))
@pytest.mark.parametrize("standard", ["c11", "c++11", "c++17"])
def test_each_header_stands_alone_without_a_warning(home: Path, tmp_path: Path, header: str, standard: str) -> None:
    source = tmp_path / ("main.cpp" if "++" in standard else "main.c")
    source.write_text(f'#include "{header}"\n#include "{Path(header).name}"\nint main(void) {{ return 0; }}\n')
    include = [f"-I{home / 'include'}", f"-I{(home / 'include' / header).parent}"]
    compiler = need("g++" if "++" in standard else "gcc")
    run([compiler, f"-std={standard}", *STRICT, "-pedantic", "-Wshadow", "-fsyntax-only", *include, source])


def test_constants_are_integers_in_both_languages(home: Path, tmp_path: Path) -> None:
    numbers = (
        "ACL_SUCCESS 0 ACL_ERROR_RT_PARAM_INVALID 107000 ACLNN_ERR_PARAM_NULLPTR 161001 ACLNN_ERR_PARAM_INVALID 161002"
        " ACLNN_ERR_INNER_STATIC_BLOCK_DIM_INVALID 561119 ACL_BF16 27 ACL_DT_UNDEFINED (-1) ACL_FORMAT_NCL 47"
        " ACL_FORMAT_UNDEFINED (-1) ACL_MEMCPY_DEVICE_TO_HOST 2 ACL_MEM_MALLOC_NORMAL_ONLY 2 ACL_HOST 1"
        " ACL_OPT_DETERMINISTIC 0 ACL_EVENT_RECORDED_STATUS_COMPLETE 1 ACL_STREAM_FAST_LAUNCH 1u"
    )
    words = numbers.split()
    checks = [f'_Static_assert({name} == {value}, "{name}");' for name, value in zip(words[::2], words[1::2])]
    front = ['#include "acl/acl.h"', '#include "aclnnop/aclnn_group_norm_backward.h"']
    c, cpp = tmp_path / "main.c", tmp_path / "main.cpp"
    switch = (
        "int f(int code) { switch (code) { case ACL_SUCCESS: return 1; case ACLNN_ERR_INNER: return 2; } return 0; }"
    )
    c.write_text("\n".join([*front, *checks, switch, ""]))
    more = "std::array<bool, 3> mask; auto code = ACL_SUCCESS; void g() { code = aclInit(nullptr); }"
    cpp.write_text("\n".join([*front, *checks, switch, more, ""]).replace("_Static_assert", "static_assert"))
    for compiler, standard, source in (("gcc", "c11", c), ("g++", "c++11", cpp), ("g++", "c++17", cpp)):
        run([need(compiler), f"-std={standard}", *STRICT, "-fsyntax-only", f"-I{home / 'include'}", source])


def test_c_and_python_take_the_same_arguments() -> None:
    import inspect

    for function in ALL_FUNCTIONS:
        inputs = [param for param in function.params if not param.is_output]
        counts = [param for param in inputs if re.fullmatch(r"\w+Num|size", param.name) and "Create" in function.name]
        signature = inspect.signature(bodies.python_function(function))
        assert len(inputs) - len(counts) == len(signature.parameters), function.name


def test_the_programs_of_the_tests_use_every_function() -> None:
    text = "".join(path.read_text() for path in (*(HERE / "c").iterdir(), *EXAMPLES.iterdir()))
    assert {function.name for function in ALL_FUNCTIONS} <= set(re.findall(r"\bacl\w+", text))


# --- programs ---------------------------------------------------------------------------------------------------------


def build_with_cmake(home: Path, source: Path, target: Path, standard: int) -> None:
    cmake = need("cmake")
    need("g++")
    environment = {**os.environ, "ASCEND_CUSTOM_PATH": str(home)}
    options = [f"-DCMAKE_CXX_STANDARD={standard}", f"-DCMAKE_CXX_FLAGS={' '.join(STRICT)}"]
    run([cmake, "-S", source, "-B", target, *options], environment)
    run([cmake, "--build", target, "-j2"], environment)


@pytest.mark.parametrize("standard", [11, 17])
def test_the_examples_print_the_golden_numbers(home: Path, tmp_path: Path, standard: int) -> None:
    build_with_cmake(home, EXAMPLES, tmp_path, standard)
    for op in OPS.values():
        result = run([tmp_path / op.folder], environment={})
        printed = {
            name: np.array(numbers.split(), float)
            for name, numbers in (line.split(":") for line in result.stdout.splitlines())
        }
        assert set(printed) == set(op.example.golden)
        for name, golden in op.example.golden.items():
            np.testing.assert_allclose(printed[name], np.ravel(golden), rtol=1e-6, atol=1e-6)
        assert result.stderr == ""


#: The shape of a client's build file: a folder by environment, both include folders, libraries by their paths.
CMAKE_LISTS = """
cmake_minimum_required(VERSION 3.14)
project(documents CXX)
set(HOME $ENV{ASCEND_CUSTOM_PATH})
include_directories(${HOME}/include ${HOME}/include/aclnn)
file(GLOB programs ${CMAKE_SOURCE_DIR}/*.cpp)
foreach(program ${programs})
  get_filename_component(name ${program} NAME_WE)
  add_executable(${name} ${program})
  target_link_libraries(${name} PRIVATE ${HOME}/lib64/libascendcl.so ${HOME}/lib64/libnnopbase.so
    ${HOME}/lib64/libopapi.so ${HOME}/lib64/libopapi_math.so ${HOME}/lib64/libopapi_nn.so)
endforeach()
"""


@pytest.mark.parametrize("standard", [11, 17])
def test_the_programs_of_the_operator_documents_print_the_golden_numbers(
    home: Path, tmp_path: Path, standard: int
) -> None:
    documents = os.environ.get("BACKNORM_DOCS")
    if not documents:
        pytest.skip("BACKNORM_DOCS does not name the folder of the operator documents")
    programs = {}
    for document in sorted(Path(documents).glob("*.txt")):
        blocks = re.findall(r"^```\w*\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        programs[f"document_{document.stem}"] = next(block for block in blocks if "int main" in block)
    assert len(programs) == 5
    for name, text in programs.items():
        (tmp_path / f"{name}.cpp").write_text(text, encoding="utf-8")
    (tmp_path / "CMakeLists.txt").write_text(CMAKE_LISTS)
    environment = {**os.environ, "ASCEND_CUSTOM_PATH": str(home)}
    cmake, flags = need("cmake"), "-Wall -Wextra"  # the programs' own warnings are theirs
    options = [f"-DCMAKE_CXX_STANDARD={standard}", f"-DCMAKE_CXX_FLAGS={flags}"]
    run([cmake, "-S", tmp_path, "-B", tmp_path / "build", *options], environment)
    built = run([cmake, "--build", tmp_path / "build", "-j2"], environment)
    assert f"{home}/include" not in re.sub("In file included from .*", "", built.stdout + built.stderr)
    for name, text in programs.items():
        op = next(op for op in OPS.values() if op.header in text)
        result = run([tmp_path / "build" / name], environment={})
        numbers = [float(number) for number in re.findall(r"is: (\S+)", result.stdout)]
        golden = np.concatenate([np.ravel(values) for values in op.example.golden.values()])
        np.testing.assert_allclose(numbers, golden, rtol=1e-6, atol=1e-6)


def test_every_function_used_as_it_should_be(compile: Compile) -> None:
    result = run([compile(HERE / "c" / "tour.c")], environment={})
    assert result.stderr == ""


def test_misuse_gets_codes_and_messages(compile: Compile) -> None:
    result = run([compile(HERE / "c" / "misuse.c")], environment={})
    assert result.stderr == ""


def test_every_witness_gives_the_same_code_and_message_as_in_python(
    ready: None, compile: Compile, tmp_path: Path
) -> None:
    cases, expected = [], []
    for op in OPS.values():
        for rule, witness, product in witnesses(op):
            if C in rule.doors:
                values = op.changed(witness.change)
                cases.append(Case(op, values, product))
                message = call_aclnn(op, values, product)[1] if ACLNN in rule.doors else ""
                expected.append((int(rule.status), sentence(op, rule, C), message))
        for product in PRODUCTS:
            cases.append(Case(op, op.good, product))
            expected.append((*call_aclnn(op, op.good, product)[:1], "", ""))
    order = sorted(range(len(cases)), key=lambda i: cases[i].product)
    source = tmp_path / "witnesses.c"
    source.write_text(render_driver([cases[i] for i in order]))
    lines = run([compile(source)], environment={}).stdout.splitlines()
    assert len(lines) == len(cases) > 1000
    for line, i in zip(lines, order):
        code, message = line.split("\t")
        status, words, in_python = expected[i]
        assert int(code) == status, (cases[i].op.name, cases[i].product, message)
        assert words in message
        if in_python and "0x" not in in_python:  # handles differ
            assert message == in_python


def test_four_threads_in_two_contexts(compile: Compile) -> None:
    result = run([compile(HERE / "c" / "stress.c"), 4, 200], environment={})
    assert result.stderr == ""


def test_ten_thousand_calls_need_no_more_memory(compile: Compile) -> None:
    before, after = map(int, run([compile(HERE / "c" / "stress.c"), 1, 10_000], environment={}).stdout.split())
    assert after - before < 2048, f"{after - before} KiB more after 8000 calls"


@pytest.mark.parametrize("how", ["return", "thread", "init", "fork"])
def test_a_program_may_end_in_the_middle(compile: Compile, how: str) -> None:
    result = run([compile(HERE / "c" / "early_exit.c"), how], environment={}, code=7)
    assert result.stderr == ""


def test_the_library_can_be_loaded_by_hand(home: Path, compile: Compile, tmp_path: Path) -> None:
    """With its symbols to itself, so that Python's are not global either."""
    source = tmp_path / "loads.c"
    source.write_text(
        textwrap.dedent("""
        #include <dlfcn.h>
        int main(int argc, char **argv)
        {
            void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : 0;
            int (*init)(const char *) = library ? (int (*)(const char *))dlsym(library, "aclInit") : 0;
            return init ? init(0) : 1;
        }
        """)
    )
    program = tmp_path / "loads"
    run([need("gcc"), source, "-o", program, "-ldl"])
    run([program, home / "lib64" / "libopapi_nn.so"], environment={})


def test_the_measurement_of_calls_runs(compile: Compile) -> None:
    """`make bench-sdk` runs it; a time is no test."""
    words = run([compile(HERE / "c" / "latency.c"), 4, 64, 10], environment={}).stdout.split()
    assert words[::2] == ["first", "median"]
    assert all(float(number) > 0 for number in words[1::2])


def check_with_valgrind(program: Path, report: Path, environment: Mapping[str, str]) -> list[ElementTree.Element]:
    """The errors whose innermost frame outside the C library is the program's, the library's or a kernel's."""
    options = ["--leak-check=full", "--show-leak-kinds=definite", "--errors-for-leak-kinds=definite"]
    options += ["--num-callers=40", "--xml=yes", f"--xml-file={report}"]
    run([need("valgrind"), *options, program], environment)
    return [error for error in ElementTree.parse(report).iter("error") if _is_ours(error, program)]


def test_valgrind_finds_nothing_of_ours(compile: Compile, tmp_path: Path) -> None:
    need("valgrind")
    parts = {"tour": HERE / "c" / "tour.c", **{op.folder: EXAMPLES / f"{op.folder}.cpp" for op in OPS.values()}}
    objects = []
    for name, source in parts.items():
        objects.append(compile(source, options=["-c", f"-Dmain={name}_main"], name=f"{name}.o"))
    main = tmp_path / "main.cpp"
    declarations = [f"int {name}_main();" for name in parts if name != "tour"] + ['extern "C" int tour_main(void);']
    calls = " + ".join(f"{name}_main()" for name in parts)
    main.write_text("\n".join([*declarations, f"int main() {{ return {calls}; }}\n"]))
    program = compile(main, *objects)
    # Valgrind's CPU is another than the machine's: kernels for any, compiled beforehand.
    environment = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    run([program], environment)
    errors = check_with_valgrind(program, tmp_path / "report.xml", environment)
    assert not errors, "\n".join(ElementTree.tostring(error, "unicode") for error in errors)


def test_valgrind_would_find_a_mistake_of_ours(compile: Compile, tmp_path: Path) -> None:
    source = tmp_path / "mistaken.c"
    source.write_text("#include <stdlib.h>\nint main(void) { volatile char *p = malloc(9); p[9] = 1; return 0; }\n")
    errors = check_with_valgrind(compile(source), tmp_path / "report.xml", {})
    assert sorted(error.findtext("kind") or "" for error in errors) == ["InvalidWrite", "Leak_DefinitelyLost"]


def _is_ours(error: ElementTree.Element, program: Path) -> bool:
    for frame in error.findall("stack")[0].iter("frame"):
        name = Path(frame.findtext("obj") or "").name
        if not re.match(r"vgpreload|libc\.|ld-linux|libstdc|libpthread|libm\.", name):
            return name in ("", program.name, "libascendcl.so")
    return True


# --- the boot ---------------------------------------------------------------------------------------------------------


def failing_start(program: Path, variables: Mapping[str, str]) -> str:
    result = run([program], environment=variables, code=None)
    assert result.stdout.split() == ["500000", "561000", "0", "1"]
    return result.stderr


BOOT = """
#include <stdio.h>
#include "acl/acl.h"
#include "aclnnop/aclnn_layer_norm_backward.h"
int main(void)
{
    printf("%d ", aclInit(NULL));
    printf("%d ", aclnnLayerNormBackward(NULL, 0, NULL, NULL));
    printf("%d ", aclCreateIntArray(NULL, 0) != NULL);
    printf("%d\\n", aclGetRecentErrMsg() != NULL);
    return 0;
}
"""


def test_a_failed_start_is_told(home: Path, compile: Compile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "boot.c"
    source.write_text(BOOT)
    program = compile(source)
    text = failing_start(program, {"BACKNORM_PYTHON": "/no/such/python"})
    assert text == "backnorm: BACKNORM_PYTHON must name a Python executable; got /no/such/python\n"
    # A Python without backnorm: a folder that is not one of the recorded ones.
    bare = tmp_path / "bare"
    run([sys.executable, "-m", "venv", "--without-pip", bare])
    text = failing_start(program, {"BACKNORM_PYTHON": str(bare / "bin" / "python")})
    assert "backnorm: the Python side did not start" in text
    # The recorded interpreter is gone.
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone" / "python"))
    other = build.build_home(tmp_path / "other")[0]
    text = failing_start(program, {"LD_PRELOAD": str(other / "lib64" / "libascendcl.so")})
    assert "gone/python, is gone: run `backnorm sdk " in text


def test_another_interpreter_may_be_chosen(compile: Compile, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", venv])
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (venv / "lib" / version / "site-packages" / "others.pth").write_text("\n".join(build._package_paths()) + "\n")
    result = run([compile(HERE / "c" / "tour.c")], environment={"BACKNORM_PYTHON": str(venv / "bin" / "python")})
    assert result.stderr == ""


def test_a_running_python_is_used(home: Path) -> None:
    """By ctypes, with the interpreter's lock (PyDLL) and without (CDLL), from several threads at once."""
    program = f"""
        import ctypes, os, sys, threading
        from backnorm import acl
        from backnorm.acl.runtime import runtime
        folder = {str(home / "lib64")!r}
        libraries = [ctypes.CDLL(folder + "/libascendcl.so"), ctypes.PyDLL(folder + "/libopapi.so")]
        codes = []
        threads = [threading.Thread(target=lambda i=i: codes.append(libraries[i % 2].aclInit(None))) for i in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert sorted(codes) == [0] + [100002] * 7, codes
        assert acl.init() == 100002  # the same runtime
        address = ctypes.c_void_p()
        assert acl.rt.set_device(0) == 0
        assert libraries[0].aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(64), 0) == 0
        assert runtime.memory.live[0].address == address.value
        assert libraries[1].aclrtFree(address) == 0
        assert acl.finalize() == 0
        if os.fork() == 0:
            os._exit(libraries[0].aclInit(None))
        assert os.wait()[1] == 0
        print("done")
    """
    assert run([sys.executable, "-c", textwrap.dedent(program)]).stdout == "done\n"


def test_the_interpreters_lock_stays_with_its_thread(home: Path) -> None:
    """A native thread calls first while another holds the lock (in C, PyDLL): nobody lets go of another's lock."""
    program = f"""
        import ctypes
        library = ctypes.CDLL({str(home / "lib64/libascendcl.so")!r})
        unlocked, locked = ctypes.CDLL(None), ctypes.PyDLL(None)
        thread, code = ctypes.c_ulong(), ctypes.c_void_p()
        assert locked.pthread_create(ctypes.byref(thread), None, library.aclInit, None) == 0
        locked.usleep(2_000)
        assert sum(len(str(i)) for i in range(100_000)) == 488_890
        assert unlocked.pthread_join(thread, ctypes.byref(code)) == 0
        assert not (code.value or 0) & 0xFFFFFFFF and library.aclInit(None) == 100002
        print("done")
    """
    assert run([sys.executable, "-c", textwrap.dedent(program)]).stdout == "done\n"


def test_an_exception_in_python_is_a_code(home: Path) -> None:
    program = f"""
        import ctypes
        from backnorm import aclnn
        from backnorm.sdk import bodies
        library = ctypes.CDLL({str(home / "lib64/libascendcl.so")!r})
        library.aclGetRecentErrMsg.restype = ctypes.c_char_p
        assert library.aclInit(None) == 0
        def broken(*_):
            raise ZeroDivisionError("ours")
        aclnn.run_executor = broken
        assert library.aclnnLayerNormBackward(None, ctypes.c_uint64(0), None, None) == 561000
        assert b"internal error: ZeroDivisionError: ours" in library.aclGetRecentErrMsg()
        from backnorm.acl.runtime import runtime
        runtime.get = broken
        assert library.aclDestroyTensor(ctypes.c_void_p(64)) == 561000
        bodies.attempt = broken  # outside of what is caught on the way
        assert library.aclnnLayerNormBackward(None, ctypes.c_uint64(0), None, None) == 561000
        assert library.aclrtSynchronizeStream(None) == 500000
        assert b"aclrtSynchronizeStream: internal error: ZeroDivisionError: ours" in library.aclGetRecentErrMsg()
    """
    result = run([sys.executable, "-c", textwrap.dedent(program)])
    assert result.stderr.splitlines() == [
        f"backnorm: {name}: internal error: ZeroDivisionError: ours"
        for name in ("aclnnLayerNormBackward", "aclDestroyTensor", "aclnnLayerNormBackward", "aclrtSynchronizeStream")
    ]


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_the_path_alone(home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "made here"
    assert cli.main(["sdk", str(target)]) == 0
    out, err = capfd.readouterr()
    assert out == f"{target}\n"
    assert re.search(r"built in \S+ s", err)
    stamps = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    assert cli.main(["sdk", str(target)]) == 0
    out, err = capfd.readouterr()
    assert out == f"{target}\n"
    assert "up to date" in err
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*")} == stamps
    (target / "include" / "acl" / "acl.h").unlink()  # something missing is made again
    assert cli.main(["sdk", str(target)]) == 0
    assert (target / "include" / "acl" / "acl.h").exists()
    assert re.search(r"built in \S+ s", capfd.readouterr().err)
    (target / "built-from").write_text("")  # as a build leaves it that was broken off
    (target / "lib64" / "libopapi.so").unlink()
    assert cli.main(["sdk", str(target)]) == 0
    assert (target / "lib64" / "libopapi.so").exists()
    shown = run(["sh", "-c", '. "$0/set_env.sh"; echo "$ASCEND_CUSTOM_PATH|$LD_LIBRARY_PATH"', target], environment={})
    assert shown.stdout == f"{target}|{target}/lib64\n"


def test_the_home_is_in_the_cache_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.default_home().parent == tmp_path / "backnorm"


def test_what_is_missing_is_told(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(*arguments: str) -> str:
        assert cli.main(["sdk", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        return err

    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("dear diary")
    assert "is no home of backnorm" in refusal(str(tmp_path / "notes"))
    (tmp_path / "file").write_text("")
    assert "is no home of backnorm" in refusal(str(tmp_path / "file"))
    with monkeypatch.context() as patch:
        patch.setenv("CC", "no-such-cc -O2")
        assert "CC='no-such-cc' was not found" in refusal(str(tmp_path / "new"))
    with monkeypatch.context() as patch:
        patch.delenv("CC", raising=False)
        patch.setenv("PATH", str(tmp_path))
        assert "no C compiler was found: install one" in refusal(str(tmp_path / "new"))
    with monkeypatch.context() as patch:
        patch.setattr(build.os.path, "isfile", lambda path: False)
        assert "has no shared library (libpython" in refusal(str(tmp_path / "new"))
    with monkeypatch.context() as patch:
        patch.setattr(build, "_find_libpython", lambda: "/lib/libpython.so")
        patch.setattr(build.sysconfig, "get_path", lambda *_, **__: "/no/include")
        assert "no Python.h in '/no/include'" in refusal(str(tmp_path / "new"))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cffi", None)
        assert "pip install 'backnorm[sdk]'" in refusal(str(tmp_path / "new"))
    with monkeypatch.context() as patch:
        patch.setenv("CC", "false")
        assert "the C compiler failed" in refusal(str(tmp_path / "new"))
    assert not (tmp_path / "new" / "built-from").exists()
