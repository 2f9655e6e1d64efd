"""The Ascend products as data: which operator each one has, and with which limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .datatypes import BF16, F16, F32, DataType


@dataclass(frozen=True)
class Support:
    """How one product runs one operator."""

    bfloat16: bool = True
    #: GroupNorm: float32 statistics and gamma beside 16-bit data.
    mixed: bool = False
    #: GroupNorm: the largest C, and the largest C / group.
    max_channels: int | None = None
    max_group_channels: int | None = None

    @property
    def dtypes(self) -> tuple[DataType, ...]:
        return (F32, F16, BF16) if self.bfloat16 else (F32, F16)


@dataclass(frozen=True)
class Product:
    """A profile: its name, the series it stands for, and its operators by name."""

    name: str
    series: str
    operators: Mapping[str, Support]


_LN, _GN, _BN = "layer_norm_backward", "group_norm_backward", "batch_norm_backward_reduce"
_FULL, _NO_BF16 = Support(), Support(bfloat16=False)
_GN_950 = Support(mixed=True, max_group_channels=8000)
_GN_A2 = Support(max_channels=240_000, max_group_channels=8000)

PRODUCTS: dict[str, Product] = {
    product.name: product
    for product in (
        Product("Ascend950", "Ascend 950PR, 950DT", {_LN: _FULL, _GN: _GN_950, _BN: _FULL}),
        Product("Ascend910_93", "Atlas A3 training and inference", {_LN: _FULL, _GN: _GN_A2, _BN: _FULL}),
        Product("Ascend910B", "Atlas A2 training and inference", {_LN: _FULL, _GN: _GN_A2, _BN: _FULL}),
        Product("Ascend910", "Atlas training", {_LN: _NO_BF16, _GN: _NO_BF16, _BN: _NO_BF16}),
        Product("Ascend310P", "Atlas inference", {_LN: _NO_BF16}),
        Product("Ascend310B", "Atlas 200I/500 A2 inference", {}),
        Product("Any", "the permissive union of all", {_LN: _FULL, _GN: Support(mixed=True), _BN: _FULL}),
    )
}
DEFAULT_PRODUCT = "Ascend910B"


def find_product(name: str) -> Product | None:
    """The profile of a name: its own, or the longest one a chip name starts with (`Ascend910B2`)."""
    if name in PRODUCTS:
        return PRODUCTS[name]
    prefixes = [known for known in PRODUCTS if known != "Any" and name.startswith(known)]
    return PRODUCTS[max(prefixes, key=len)] if prefixes else None
