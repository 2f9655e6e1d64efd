"""Every operator, through every door, agrees with the float64 reference within the bound."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from backnorm import acl

from .calls import Good, good_calls, truth


def run_and_check(good: Good) -> None:
    golden, terms = truth(good)
    if good.door == "aclnn":
        assert acl.set_soc(good.product) == 0
    good.check(good.run(), golden, terms)


@pytest.mark.usefixtures("ready")
@given(good=good_calls())
@settings(max_examples=1500)
def test_any_shape_type_mask_layout_and_product_agrees_with_the_reference(good: Good) -> None:
    run_and_check(good)


@pytest.mark.usefixtures("ready")
@given(good=good_calls(data="infinite"))
@settings(max_examples=500)
def test_nan_and_inf_propagate_as_in_the_reference(good: Good) -> None:
    run_and_check(good)


@pytest.mark.usefixtures("ready")
@given(good=good_calls(data="subnormal"))
@settings(max_examples=500)
def test_subnormals_and_zeros_agree_with_the_reference(good: Good) -> None:
    run_and_check(good)
