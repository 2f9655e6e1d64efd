"""Builds a home: headers, the library and set_env.sh. What is there and made from the same sources is kept."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from .headers import render_headers
from .library import EXPORTS, HELPERS, LIBRARY, MODULE, NAMES, START, declarations, render_source

_KEY, _SCRATCH = "built-from", ".building-"


class CannotBuild(Exception):
    """What is missing, and what to install."""


def default_home() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    tag = hashlib.sha256(os.fsencode(sys.executable)).hexdigest()[:8]
    return Path(cache) / "backnorm" / f"home-{sys.version_info.major}.{sys.version_info.minor}-{tag}"


def build_home(directory: Path | None = None) -> tuple[Path, float]:
    """The home's path, and the seconds its building took: 0 where nothing had to be done."""
    begun = time.perf_counter()
    try:
        home = (directory or default_home()).expanduser().absolute()
    except RuntimeError:  # ~somebody who is not known here
        raise CannotBuild(f"the folder must be one this machine can name; got {str(directory)!r}") from None
    if sys.platform != "linux":
        raise CannotBuild(f"the C home is made for Linux; this is {sys.platform}")
    if directory is not None and not (home / _KEY).exists() and _holds_something(home):
        raise CannotBuild(f"{str(home)!r} exists and is no home of backnorm: name a new or an empty folder")
    compiler, libpython, include = _find_compiler(), _find_libpython(), _find_python_headers()
    cffi_version = _find_cffi()
    command = "backnorm sdk" if directory is None else f"backnorm sdk {shlex.quote(str(home))}"
    source = render_source(sys.executable, libpython, _search_paths(), _package_paths(), command)
    headers = render_headers()
    options = ["-O1", "-g", "-fPIC", "-shared", "-pthread", f"-I{include}", f"-Wl,-soname,{LIBRARY}"]
    # Never unmapped: an interpreter that was started stays. A path may hold a comma, which -Wl would take apart.
    options += ["-Wl,-z,nodelete", "-Xlinker", "-rpath", "-Xlinker", os.path.dirname(libpython)]
    parts = [cffi_version, sys.version, *compiler, *options, libpython, source, declarations(), HELPERS, START, EXPORTS]
    for path, text in headers.items():
        parts += [path, text]
    key = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()
    if (home / _KEY).exists() and (home / _KEY).read_text() == f"{key} {home}\n" and _is_whole(home, headers):
        return home, 0.0
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=home) as scratch:
            made = Path(scratch)
            for path, text in headers.items():
                _write(made / "include" / path, text)
            _write(made / "set_env.sh", _render_set_env(home))
            _compile(made, compiler, options, libpython, source)
            _write(made / _KEY, f"{key} {home}\n")  # moved last, once all else is there
            (home / _KEY).touch()  # ours from now on, and not yet whole, should this be broken off
            for name in (*(f"include/{path}" for path in headers), f"lib64/{LIBRARY}", "set_env.sh", _KEY):
                (home / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(made / name, home / name)
                if name.startswith("lib64/"):
                    _link_names(home / "lib64")
    except OSError as error:
        raise CannotBuild(f"cannot write {str(home)!r}: {error.strerror}") from None
    return home, time.perf_counter() - begun


def _holds_something(home: Path) -> bool:
    if not home.is_dir():
        return home.exists()
    return any(not path.name.startswith(_SCRATCH) for path in home.iterdir())  # a build that was broken off is nothing


def _is_whole(home: Path, headers: dict[str, str]) -> bool:
    names = [*(f"include/{path}" for path in headers), *(f"lib64/{name}" for name in (LIBRARY, *NAMES)), "set_env.sh"]
    return all((home / name).is_file() for name in names)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="surrogateescape")


def _link_names(folder: Path) -> None:
    """The other libraries a client links are this one."""
    for name in NAMES:
        link = folder / name
        if not (link.is_symlink() and os.readlink(link) == LIBRARY):
            with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder) as scratch:  # another build may be at it too
                (Path(scratch) / name).symlink_to(LIBRARY)
                os.replace(Path(scratch) / name, link)


def _render_set_env(home: Path) -> str:
    return (
        "# For a shell: where the home is, and where its libraries are found when a program starts.\n"
        f"export ASCEND_CUSTOM_PATH={shlex.quote(str(home))}\n"
        "export ASCEND_HOME_PATH=$ASCEND_CUSTOM_PATH\n"
        'export LD_LIBRARY_PATH="$ASCEND_CUSTOM_PATH/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"\n'
    )


def _compile(made: Path, compiler: list[str], options: list[str], libpython: str, source: str) -> None:
    from cffi import FFI

    ffi = FFI()
    ffi.embedding_api(declarations())
    ffi.cdef(HELPERS)
    ffi.set_source(MODULE, source)
    ffi.embedding_init_code(START)
    c_file, exports, library = made / "library.c", made / "exports.map", made / "lib64" / LIBRARY
    with contextlib.redirect_stdout(io.StringIO()):  # cffi says what it does
        ffi.emit_c_code(str(c_file))
    _write(exports, EXPORTS)
    library.parent.mkdir()
    command = [*compiler, *options, f"-I{made / 'include'}", "-Xlinker", "--version-script", "-Xlinker", str(exports)]
    command += ["-o", str(library), str(c_file), libpython, "-lstdc++", "-ldl"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise CannotBuild(
            f"the C compiler failed:\n{shlex.join(command)}\n{result.stderr.strip()}\n"
            "A missing -lstdc++ comes with g++ (Debian: apt install g++)."
        )


# --- what must be on the machine --------------------------------------------------------------------------------------


def _find_compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in [chosen] if chosen else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    what = f"CC={chosen[0]!r} was not found" if chosen else "no C compiler was found"
    raise CannotBuild(f"{what}: install one (Debian: apt install gcc g++) or name it in CC")


def _find_libpython() -> str:
    """The shared library of this Python, which need not be what its executable is made of."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folders = [str(sysconfig.get_config_var(name)) for name in ("LIBDIR", "LIBPL")] + [f"{sys.base_prefix}/lib"]
    folders += [f"{folder}/{sysconfig.get_config_var('MULTIARCH')}" for folder in folders]
    names = [str(sysconfig.get_config_var("INSTSONAME")), f"libpython{version}.so.1.0", f"libpython{version}.so"]
    for folder in folders:
        for name in names:
            if ".so" in name and os.path.isfile(f"{folder}/{name}"):
                return f"{folder}/{name}"
    raise CannotBuild(
        f"Python {version} has no shared library (libpython{version}.so): install it (Debian: apt install"
        f" libpython{version}), or use a Python built with --enable-shared (pyenv:"
        f" PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install)"
    )


def _find_python_headers() -> str:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    include = sysconfig.get_path("include", vars={"base": sys.base_prefix, "installed_base": sys.base_prefix})
    if not os.path.isfile(os.path.join(include, "Python.h")):
        raise CannotBuild(
            f"the headers of Python {version} are missing (no Python.h in {include!r}): install them (Debian: apt"
            f" install libpython{version}-dev)"
        )
    return str(include)


def _find_cffi() -> str:
    try:
        import cffi
    except ImportError:
        raise CannotBuild("cffi is missing: pip install 'backnorm[sdk]'") from None
    return str(cffi.__version__)


def _package_paths() -> list[str]:
    """The folders of what the library imports."""
    paths = set()
    for name in ("backnorm", "_cffi_backend", "cffi", "numpy", "ml_dtypes", "numba", "llvmlite"):
        spec = importlib.util.find_spec(name)
        if spec and spec.origin:
            folder = os.path.dirname(os.path.abspath(spec.origin))
            paths.add(os.path.dirname(folder) if spec.submodule_search_locations else folder)
    return sorted(paths)


def _search_paths() -> list[str]:
    """sys.path, but for folders that are in it by chance, such as the one a command was run in."""
    library = os.path.dirname(os.path.abspath(os.__file__))
    packages = _package_paths()
    paths = [os.path.abspath(path) for path in sys.path]
    kept = [path for path in paths if path in packages or path == library or os.path.dirname(path) == library]
    return list(dict.fromkeys([*kept, *packages]))
