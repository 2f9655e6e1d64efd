"""The source of the library: exported functions in C, each behind the boot, which hand over to Python.

`declarations` is what Python implements (`bodies.py`), with plain types: handles and addresses are integers there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..ops import OPS
from .interface import ALL_FUNCTIONS, ENUMS, POINTERS, STRUCTS, Function, Parameter

#: Before the names of the Python functions.
PREFIX = "py_"
NAMES = ("libnnopbase.so", "libopapi.so", "libopapi_math.so", "libopapi_nn.so")
LIBRARY = "libascendcl.so"
MODULE = "_backnorm_home"

#: C functions that Python calls.
HELPERS = """
int64_t *new_array(size_t count);
void finish_work_at_exit(void);
char *getenv(const char *name);
"""
#: What Python runs when it is started for the library.
START = f"""
from {MODULE} import ffi, lib
from backnorm.sdk.bodies import connect
connect(ffi, lib)
"""
EXPORTS = "{ global: acl*; local: *; };\n"


def declarations() -> str:
    lines = [_plain_declaration(function) for function in ALL_FUNCTIONS]
    return "\n".join([*lines, f"void {PREFIX}finish_work(void);"])


def render_source(
    executable: str, libpython: str, search_paths: Sequence[str], package_paths: Sequence[str], command: str
) -> str:
    """The C of the library but for what cffi adds."""
    texts = {"EXECUTABLE": executable, "LIBPYTHON": libpython, "HOME_COMMAND": command}
    lists = {"search_paths": search_paths, "package_paths": package_paths}
    lines = [
        *(f"#define {name} {_text(value)}" for name, value in texts.items()),
        *(
            f"static const char *const {name}[] = {{{', '.join([*map(_text, values), '0'])}}};"
            for name, values in lists.items()
        ),
        "",
        '#include "acl/acl.h"',
        *(f'#include "aclnnop/{op.header}"' for op in OPS.values()),
        declarations(),
        "",
        Path(__file__).with_name("boot.c").read_text(encoding="utf-8"),
        *(_export(function) for function in ALL_FUNCTIONS),
    ]
    return "\n".join(lines)


def _text(value: str) -> str:
    """A C string, whatever the bytes."""
    plain = set(range(32, 127)) - set(b'"\\?')
    letters = (chr(b) if b in plain else f"\\{b:03o}" for b in value.encode("utf-8", "surrogateescape"))
    return f'"{"".join(letters)}"'


def plain_type(type: str) -> str:
    """The type as Python sees it."""
    target = type.removesuffix("*")
    if target != type and Parameter(type, "").is_output:
        return plain_type(target) + "*"
    if type in ENUMS:
        return "int"
    if type in ("const char*", "const int64_t*", "const bool*") or not (target != type or type in POINTERS):
        return {"aclError": "int", "aclnnStatus": "int32_t", "aclFloat16": "uint16_t"}.get(type, type)
    assert type in POINTERS or target.removeprefix("const ") in ("void", "int64_t", *STRUCTS), type
    return "uintptr_t"


def _plain_declaration(function: Function) -> str:
    returns = "uintptr_t" if function.returns.endswith("*") else plain_type(function.returns)
    params = ", ".join(f"{plain_type(param.type)} {param.name}" for param in function.params)
    return f"{returns} {PREFIX}{function.name}({params or 'void'});"


def _export(function: Function) -> str:
    arguments = ", ".join(f"({plain_type(param.type)}){param.name}" for param in function.params)
    failed = str(function.failed)
    if function.name == "aclGetRecentErrMsg":
        failed = "failure"
    return (
        f"{function.declaration}\n{{\n    if (!ready())\n        return {failed};\n"
        f"    return ({function.returns}){PREFIX}{function.name}({arguments});\n}}\n"
    )
