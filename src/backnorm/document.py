"""Renders docs/operators.md from the specs: `python -m backnorm.document [--check] FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

from .datatypes import PUBLIC_FORMATS, dtype_name
from .ops import OPS
from .products import DEFAULT_PRODUCT, PRODUCTS, Product, Support
from .sdk.interface import Function, phase_one, phase_two
from .spec import DOORS, OpSpec, Param, Rule
from .status import Status


def render() -> str:
    """The whole page."""
    lines = [
        "# The operators",
        "",
        "Generated from the specs by `make docs`; do not edit.",
        "",
        "Rules are checked in the order of the tables and the first broken one decides the status. Rules on an",
        "optional tensor hold while it is absent, rules on an output while its switch is off.",
        "The array functions go by the same rules; `product=` names the product (default `Any`).",
        "",
        "## Products",
        "",
        f"`BACKNORM_SOC` or `acl.set_soc(name)` chooses one for the two-phase calls; the default is {DEFAULT_PRODUCT}.",
        "",
        *_table(
            ["product", "series", *(op.c_name for op in OPS.values())],
            [[p.name, p.series, *(_support(p, op) for op in OPS.values())] for p in PRODUCTS.values()],
        ),
        "",
        "mixed: (gradOut, mean) may also be (float16, float32) or (bfloat16, float32).",
        f"Public formats: {', '.join(f.name for f in sorted(PUBLIC_FORMATS))}.",
    ]
    for op in OPS.values():
        lines += ["", *_operator(op)]
    lines += ["", "## Status codes", "", *_table(["code", "name"], [[str(int(s)), f"`{s.name}`"] for s in Status])]
    return "\n".join(lines) + "\n"


def _operator(op: OpSpec) -> list[str]:
    return [
        f"## {op.title}",
        "",
        "```c",
        f"// aclnnop/{op.header}",
        *_prototype(phase_one(op), ",\n    "),
        *_prototype(phase_two(op), ", "),
        "```",
        "",
        f"Array function: `backnorm.{op.name}`.",
        "",
        *_table(
            ["C name", "array name", "kind", "given", "meaning"],
            [
                [f"`{p.name}`", f"`{p.array_name}`", p.kind.replace("_", " "), _given(p), p.meaning]
                for p in op.params
                if p.kind != "out_pointer"
            ],
        ),
        "",
        *_table(["step", "status", "rule", "products", "doors"], _rule_rows(op)),
    ]


def _prototype(function: Function, between: str) -> list[str]:
    params = between.join(f"{param.type} {param.name}" for param in function.params)
    return [f"{function.returns} {function.name}(", f"    {params})"]


def _given(param: Param) -> str:
    if param.requested:
        return f"with `{param.requested}`"
    return "optional" if param.optional else "always"


def _rule_rows(op: OpSpec) -> list[list[str]]:
    words = {param.name: f"`{param.name}`" for param in op.params}
    rows = []
    for number, step in enumerate(op.steps):
        for rule in step.rules:
            title = f"{number} {step.title}" if rule is step.rules[0] else ""
            parameter = words.get(rule.parameter, "the operator")
            sentence = f"{parameter} must {rule.must.format_map(words)}"
            rows.append([title, str(int(rule.status)), sentence, _products(op, rule), _doors(rule)])
    return rows


def _products(op: OpSpec, rule: Rule) -> str:
    concerned = [product.name for product in op.products(rule)]
    everywhere = [p.name for p in PRODUCTS.values() if op.name in p.operators]
    return "all" if set(concerned) >= set(everywhere) else ", ".join(concerned)


def _doors(rule: Rule) -> str:
    return "all" if rule.doors == DOORS else ", ".join(rule.doors)


def _support(product: Product, op: OpSpec) -> str:
    support = product.operators.get(op.name)
    if support is None:
        return "no"
    return "; ".join([", ".join(dtype_name(d) for d in support.dtypes), *_limits(support)])


def _limits(support: Support) -> list[str]:
    limits = ["mixed"] if support.mixed else []
    if support.max_channels is not None:
        limits.append(f"C ≤ {support.max_channels}")
    if support.max_group_channels is not None:
        limits.append(f"C/group ≤ {support.max_group_channels}")
    return limits


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def main(argv: list[str]) -> int:
    path = Path(argv[-1])
    if "--check" not in argv:
        path.write_text(render(), encoding="utf-8")
        return 0
    if path.read_text(encoding="utf-8") == render():
        return 0
    print(f"{path} is stale: run `make docs`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
