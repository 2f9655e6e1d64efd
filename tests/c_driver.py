"""A C program that makes many calls of phase one and prints each one's code and message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backnorm.ops import OPS
from backnorm.sdk.interface import phase_one
from backnorm.spec import Dead, OpSpec, TensorDesc


@dataclass(frozen=True)
class Case:
    op: OpSpec
    values: Mapping[str, Any]
    product: str


_FRONT = """
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include "acl/acl.h"
%s

typedef struct {
    char kind; /* t tensor, i and b arrays, n number, p out-pointer, d destroyed tensor, 0 null */
    int count, dtype, format;
    int64_t values[10], strides[10];
} Argument;

static const Argument arguments[] = {
%s
};

static uint64_t size;
static aclOpExecutor *executor;

static void *make(const Argument *argument)
{
    void *made = NULL;
    bool flags[10];
    switch (argument->kind) {
    case 't':
        return aclCreateTensor(argument->values, argument->count, (aclDataType)argument->dtype, argument->strides, 0,
                               (aclFormat)argument->format, argument->values, argument->count, NULL);
    case 'd':
        made = aclCreateTensor(argument->values, 1, ACL_FLOAT, NULL, 0, ACL_FORMAT_ND, argument->values, 1, NULL);
        aclDestroyTensor(made);
        return made;
    case 'i':
        return aclCreateIntArray(argument->values, argument->count);
    case 'b':
        for (int i = 0; i < argument->count; i++)
            flags[i] = argument->values[i] != 0;
        return aclCreateBoolArray(flags, argument->count);
    }
    return NULL;
}

static void release(const Argument *argument, void *made)
{
    int ret = argument->kind == 't' ? aclDestroyTensor(made) : argument->kind == 'i' ? aclDestroyIntArray(made)
            : argument->kind == 'b' ? aclDestroyBoolArray(made) : 0;
    if (ret)
        exit(3);
}

static int call(int op, const Argument **given, void **made)
{
    switch (op) {
%s
    }
    return -1;
}

static void run(int op, const short *places, int count)
{
    const Argument *given[16];
    void *made[16];
    aclOpExecutor *const before = (aclOpExecutor *)0x55;
    size = 0x55;
    executor = before;
    for (int i = 0; i < count; i++) {
        given[i] = &arguments[places[i]];
        made[i] = make(given[i]);
    }
    int ret = call(op, given, made);
    const char *message = aclGetRecentErrMsg();
    if (ret ? (size != 0x55 || executor != before) : (executor == before || aclDestroyAclOpExecutor(executor)))
        exit(4);
    printf("%%d\\t%%s\\n", ret, message ? message : "");
    for (int i = 0; i < count; i++)
        release(given[i], made[i]);
}

static void start(const char *product)
{
    setenv("BACKNORM_SOC", product, 1);
    if (aclInit(NULL) || aclrtSetDevice(0))
        exit(2);
}
"""


def render_driver(cases: list[Case]) -> str:
    """Cases run in order; those of one product should stand together."""
    table: dict[str, int] = {}
    numbers = {op.name: i for i, op in enumerate(OPS.values())}
    rows = []
    for case in cases:
        places = [
            table.setdefault(_argument(param.kind, case.values[param.name]), len(table)) for param in case.op.params
        ]
        rows.append((case.product, numbers[case.op.name], places))
    lines = ["int main(void)", "{"]
    product = None
    for of_product, number, places in rows:
        if of_product != product:
            lines += ["    aclFinalize();"] if product else []
            lines.append(f'    start("{of_product}");')
            product = of_product
        lines.append(f"    run({number}, (const short[]){{{', '.join(map(str, places))}}}, {len(places)});")
    lines += ["    return aclFinalize();", "}"]
    includes = "\n".join(f'#include "aclnnop/{op.header}"' for op in OPS.values())
    calls = "\n".join(f"    case {number}:\n        return {_call(OPS[name])};" for name, number in numbers.items())
    return _FRONT % (includes, "\n".join(table), calls) + "\n".join(lines) + "\n"


def _argument(kind: str, value: Any) -> str:
    if kind == "out_pointer":
        return _row("p" if value else "0")
    if kind in ("int64", "bool"):
        return _row("n", [value])
    if value is None:
        return _row("0")
    if isinstance(value, Dead):
        return _row("d", [2])
    if isinstance(value, TensorDesc):
        return _row("t", value.shape, value.dtype, value.format, value.strides)
    return _row("b" if kind == "bool_array" else "i", value)


def _row(kind: str, values: Any = (), dtype: int = 0, format: int = 0, strides: Any = ()) -> str:
    lists = [", ".join(_number(int(number)) for number in numbers) or "0" for numbers in (values, strides)]
    return f"    {{'{kind}', {len(values)}, {int(dtype)}, {int(format)}, {{{lists[0]}}}, {{{lists[1]}}}}},"


def _number(number: int) -> str:
    return str(number) if number > -(2**63) else f"({number + 1} - 1)"  # C has no such literal


def _call(op: OpSpec) -> str:
    arguments = []
    for i, param in enumerate(op.params):
        if param.name in ("workspaceSize", "executor"):
            variable = "&size" if param.name == "workspaceSize" else "&executor"
            arguments.append(f"given[{i}]->kind == 'p' ? {variable} : NULL")
        elif param.kind in ("int64", "bool"):
            arguments.append(f"given[{i}]->values[0]")
        else:
            arguments.append(f"made[{i}]")
    return f"{phase_one(op).name}({', '.join(arguments)})"
