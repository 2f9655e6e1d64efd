"""Random good calls of every operator, for hypothesis: shapes, dtypes, masks, layouts and products."""

from __future__ import annotations

import importlib
from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st

from backnorm.accuracy import excess
from backnorm.datatypes import F32, NUMPY
from backnorm.ops import OPS
from backnorm.products import PRODUCTS
from backnorm.spec import OpSpec

from .doors import Layout, fill, lay_out, run_aclnn, run_arrays, untouched

INPUT_STYLES = ("packed", "permuted", "offset", "gapped", "expanded", "reversed")
OUTPUT_STYLES = ("packed", "permuted", "offset", "gapped", "reversed")
DOORS = ("numpy", "torch", "aclnn")


class Good:
    """A call that must succeed, ready for any door."""

    def __init__(self, op: OpSpec, product: str, door: str, call: dict[str, Any], writes: tuple[str, ...]) -> None:
        self.op, self.product, self.door, self.call, self.writes = op, product, door, call, writes

    def __repr__(self) -> str:
        arguments = ", ".join(
            f"{name}={v.base.dtype.name}{list(v.shape)}/{list(v.strides)}" if isinstance(v, Layout) else f"{name}={v}"
            for name, v in self.call.items()
        )
        return f"<{self.op.name} on {self.product} through {self.door}: {arguments}>"

    def values(self) -> dict[str, Any]:
        return {name: v.view() if isinstance(v, Layout) else v for name, v in self.call.items()}

    def run(self, stream: int = 0) -> dict[str, np.ndarray]:
        if self.door == "aclnn":
            return run_aclnn(self.op, self.call, stream)
        return run_arrays(self.op, self.call, self.product, as_torch=self.door == "torch")

    def check(self, bases: dict[str, np.ndarray], golden: dict[str, Any], terms: dict[str, Any]) -> None:
        """Requested outputs within the bound; nothing written outside them, nor to any other output."""
        for param in self.op.outputs:
            layout = self.call[param.name]
            if layout is None:
                continue
            base = bases[param.name]
            if param.name in self.writes:
                over = excess(layout.view(base), golden[param.name], terms[param.name])
                numbers = f"{layout.view(base)}\nbut should be\n{golden[param.name]}"
                assert over <= 1, f"{param.name} is off by {over} times its bound:\n{numbers}"
                assert untouched(layout, base), f"{param.name} was written outside its view"
            else:
                assert np.all(base.view(np.uint8) == 0xA5), f"{param.name} is masked off but was written"


def truth(good: Good) -> tuple[dict[str, Any], dict[str, Any]]:
    module = importlib.import_module(f"backnorm.ops.{good.op.folder}.reference")
    values = good.values()
    return module.reference(values), module.terms(values)


def _split(draw: Any, count: int, lowest: int) -> tuple[int, ...]:
    """A shape of `count` elements: flat, with ones, or in two factors; empty shape for one element if allowed."""
    if count == 1 and lowest == 0 and draw(st.booleans()):
        return ()
    factors = [d for d in range(1, count + 1) if count % d == 0] or [0]
    first = draw(st.sampled_from(factors[:6] + factors[-2:]))
    shape = (first, count // first) if first else (0, 3)
    return draw(st.sampled_from([(count,), shape, (*shape, 1), (1, *shape)]))


@st.composite
def good_calls(draw: Any, doors: tuple[str, ...] = DOORS, data: str = "plain") -> Good:
    op = OPS[draw(st.sampled_from(sorted(OPS)))]
    product = draw(st.sampled_from([p.name for p in PRODUCTS.values() if op.name in p.operators]))
    support = PRODUCTS[product].operators[op.name]
    door = draw(st.sampled_from(doors))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtypes = st.sampled_from(support.dtypes)
    main = draw(dtypes)
    dims = st.integers(0, 9) if draw(st.integers(0, 7)) == 0 else st.integers(1, 9)
    call: dict[str, Any] = {}
    styles: dict[str, tuple[tuple[int, ...], int]] = {}

    if op.folder == "layer_norm":
        leading = draw(st.lists(dims, min_size=0, max_size=3))
        trailing = draw(st.lists(dims, min_size=1, max_size=4))
        if draw(st.booleans()):
            trailing[-1] = draw(st.sampled_from([1, 7, 16, 33, 257]))
        leading += [1] * draw(st.integers(0, 8 - len(leading) - len(trailing))) if draw(st.booleans()) else []
        shape, normalized = (*leading, *trailing), tuple(trailing)
        rows = prod(leading)
        statistics = draw(st.sampled_from([(*leading, *[1] * len(trailing)), (rows,), (1, rows)]))
        for name in ("gradOut", "input"):
            styles[name] = (shape, main)
        for name in ("mean", "rstd"):
            styles[name] = (statistics, draw(dtypes))
        call["weightOptional"] = call["biasOptional"] = None
        if draw(st.booleans()):
            styles["weightOptional"] = (normalized, draw(st.sampled_from([F32, main])))
        if draw(st.booleans()):
            styles["biasOptional"] = (normalized, draw(dtypes))
        call["normalizedShape"] = normalized
        outputs = {"gradInputOut": shape, "gradWeightOut": normalized, "gradBiasOut": normalized}
        output_dtypes = {name: draw(dtypes) for name in outputs}
    elif op.folder == "group_norm":
        n, group, width, hw = draw(dims), draw(st.integers(1, 4)), draw(dims), draw(dims)
        hw = draw(st.sampled_from([hw, 49, 130]))
        channels = group * width
        count = n * channels * hw
        mean = draw(st.sampled_from([F32, main])) if support.mixed else main
        nchw = (n, channels, hw, 1)
        styles["gradOut"] = (draw(st.sampled_from([nchw, nchw[:3], (count,), (n, channels * hw)])), main)
        styles["input"] = (draw(st.sampled_from([nchw, nchw[:3], (count,)])), main)
        for name in ("mean", "rstd"):
            styles[name] = (_split(draw, n * group, 0), mean)
        call["gamma"] = None
        if draw(st.booleans()):
            styles["gamma"] = (_split(draw, channels, 0), mean)
        call |= {"N": n, "C": channels, "HxW": hw, "group": group}
        gamma_shape = styles["gamma"][0] if "gamma" in styles else (channels,)
        outputs = {"gradInput": styles["input"][0], "gradGammaOut": gamma_shape, "gradBetaOut": gamma_shape}
        output_dtypes = {"gradInput": main, "gradGammaOut": mean, "gradBetaOut": mean}
    else:
        channels = draw(st.integers(1, 9))
        rest = draw(st.lists(dims, min_size=0, max_size=4))
        rest += [1] * draw(st.integers(0, 6 - len(rest))) if draw(st.booleans()) else []
        shape = (draw(st.sampled_from([draw(dims), 70])), channels, *rest)
        for name in ("gradOut", "input"):
            styles[name] = (shape, main)
        for name in ("mean", "invstd"):
            styles[name] = ((channels,), draw(dtypes))
        call["weight"] = None
        if draw(st.booleans()):
            styles["weight"] = ((channels,), draw(dtypes))
        outputs = {param.name: (channels,) for param in op.outputs}
        output_dtypes = {name: draw(dtypes) for name in outputs}

    mask = draw(st.tuples(*[st.sampled_from([True, True, False])] * 3))
    if op.folder == "batch_norm_reduce":
        call |= dict(zip(("inputG", "weightG", "biasG"), mask))
        asked = (mask[0], mask[0], mask[1], mask[2])
    else:
        call["outputMask"] = asked = mask

    torch_strides = door == "torch"  # torch has no negative strides
    for name, (shape, dtype) in styles.items():
        style = draw(st.sampled_from(INPUT_STYLES[:-1] if torch_strides else INPUT_STYLES))
        call[name] = fill(lay_out(shape, NUMPY[dtype], style, rng), make_values(name, shape, data, rng))
    writes = []
    for (name, shape), wanted in zip(outputs.items(), asked):
        if not wanted and draw(st.booleans()):
            call[name] = None
            continue
        style = draw(st.sampled_from(OUTPUT_STYLES[:-1] if torch_strides else OUTPUT_STYLES))
        call[name] = lay_out(shape, NUMPY[output_dtypes[name]], style, rng)
        if wanted:
            writes.append(name)
    ordered = {param.name: call[param.name] for param in op.params if param.kind != "out_pointer"}
    return Good(op, product, door, ordered, tuple(writes))


def make_values(name: str, shape: tuple[int, ...], data: str, rng: np.random.Generator) -> np.ndarray:
    """Statistics that need not fit the data, rstd of both signs and zero; planted specials on demand."""
    values = rng.standard_normal(shape) * 10.0 ** rng.uniform(-1, 1) + rng.choice([0.0, 0.0, 3.0, -20.0])
    if name in ("rstd", "invstd"):
        values = rng.uniform(-2, 2, shape) * (rng.random(shape) < 0.9)
    specials = {
        "plain": [0.0],
        "infinite": [np.nan, np.inf, -np.inf, 0.0, -0.0],
        "subnormal": [1e-40, -1e-40, 2.0**-149, 6e-8, -6e-8, 2.0**-133, 0.0, -0.0],
    }[data]
    planted = rng.random(shape) < (0.05 if data != "plain" else 0.02)
    return np.where(planted, rng.choice(specials, shape), values)
