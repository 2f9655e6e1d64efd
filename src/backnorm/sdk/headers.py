"""The headers of the home, valid C11 and C++11, as text by their path under include/."""

from __future__ import annotations

from collections.abc import Iterable

from ..ops import OPS
from ..spec import OpSpec, Param
from ..status import Status
from .interface import ACL_CODES, ACLNN_CODES, ENUMS, FLAGS, FUNCTIONS, POINTERS, STRUCTS, Function

_NOTE = "/* Rendered by `backnorm sdk` from the project's own description of the interface; do not edit. */"


def render_headers() -> dict[str, str]:
    base = ["<stdbool.h>", "<stddef.h>", "<stdint.h>"]
    return {
        "acl/acl_base.h": _header("acl/acl_base.h", base, _base_types()),
        "acl/acl_rt.h": _header("acl/acl_rt.h", ['"acl/acl_base.h"'], _runtime_types()),
        "acl/acl.h": _header("acl/acl.h", ['"acl/acl_base.h"', '"acl/acl_rt.h"'], []),
        "aclnn/acl_meta.h": _header("aclnn/acl_meta.h", ['"acl/acl_base.h"', '"acl/acl_rt.h"'], _tensor_types()),
        "aclnn/aclnn_base.h": _header("aclnn/aclnn_base.h", ['"aclnn/acl_meta.h"'], []),
        **{
            f"aclnnop/{op.header}": _header(
                f"aclnnop/{op.header}", ['"aclnn/aclnn_base.h"'], _operator(op), cpp_includes=["<array>"]
            )
            for op in OPS.values()
        },
    }


def _header(path: str, includes: list[str], body: list[str], cpp_includes: Iterable[str] = ()) -> str:
    guard = "BACKNORM_" + path.upper().replace("/", "_").replace(".", "_")
    lines = [_NOTE, f"#ifndef {guard}", f"#define {guard}", "", *(f"#include {name}" for name in includes)]
    if cpp_includes:
        lines += ["#ifdef __cplusplus", *(f"#include {name}" for name in cpp_includes), "#endif"]
    lines += ["", "#ifdef __cplusplus", 'extern "C" {', "#endif", "", *body]
    for function in FUNCTIONS[path]:
        lines += [*_prototype(function), ""]
    lines += ["#ifdef __cplusplus", "}", "#endif", "", f"#endif /* {guard} */"]
    return "\n".join(lines) + "\n"


def _prototype(function: Function) -> list[str]:
    if len(function.declaration) < 110:
        return [f"{function.declaration};"]
    lines = [f"    {param.type} {param.name}," for param in function.params]
    return [f"{function.returns} {function.name}(", *lines[:-1], f"{lines[-1][:-1]});"]


def _base_types() -> list[str]:
    return [
        "typedef int aclError;",
        "typedef uint16_t aclFloat16;",
        "",
        *_codes(ACL_CODES),
        "",
        *_enum("aclDataType"),
        *_enum("aclFormat"),
    ]


def _runtime_types() -> list[str]:
    own = [name for name in ENUMS if name not in ("aclDataType", "aclFormat")]
    return [
        *(f"typedef void* {name};" for name in POINTERS),
        "",
        *(line for name in own for line in _enum(name)),
        *(f"#define {name} {value}u" for name, value in FLAGS.items()),
        "",
    ]


def _tensor_types() -> list[str]:
    return [
        "typedef int32_t aclnnStatus;",
        *(f"typedef struct {name} {name};" for name in STRUCTS),
        "",
        *_codes(ACLNN_CODES),
        "",
    ]


def _codes(codes: list[Status]) -> list[str]:
    """Integers in C++, so that `auto` gives one; an enum in C, where a const is no constant expression."""
    return [
        "#ifdef __cplusplus",
        *(f"static const int {code.name} = {int(code)};" for code in codes),
        "#else",
        "enum {",
        *(f"    {code.name} = {int(code)}," for code in codes),
        "};",
        "#endif",
    ]


def _enum(name: str) -> list[str]:
    return ["typedef enum {", *(f"    {word} = {value}," for word, value in ENUMS[name].items()), f"}} {name};", ""]


def _operator(op: OpSpec) -> list[str]:
    return [
        f"/* {op.title}. The first function checks and plans, the second queues the work on a stream.",
        " *",
        *(f" * {param.name}: {_ascii(param.meaning)}{_given(param)}" for param in op.params),
        " */",
    ]


def _given(param: Param) -> str:
    if param.requested:
        return f"; looked at with {param.requested} only"
    return "; may be null" if param.optional else ""


def _ascii(text: str) -> str:
    return text.replace("…", "...").replace("·", "*")
