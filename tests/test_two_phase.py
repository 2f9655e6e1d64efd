"""Phase two: executors, workspaces, lifetimes, addresses, empty tensors, aliasing and determinism."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from backnorm import acl, aclnn
from backnorm.acl.runtime import runtime
from backnorm.ops import OPS

from .doors import Client, lay_out, queue_python

ROWS, COLS = 6, 10


class LayerNorm:
    """A LayerNorm call whose every piece a test can bend."""

    def __init__(self, client: Client, mask: tuple[bool, ...] = (True, True, True)) -> None:
        rng = np.random.default_rng(3)
        shapes = {
            "gradOut": (ROWS, COLS), "input": (ROWS, COLS), "mean": (ROWS, 1), "rstd": (ROWS, 1),
            "weightOptional": (COLS,), "biasOptional": (COLS,),
            "gradInputOut": (ROWS, COLS), "gradWeightOut": (COLS,), "gradBiasOut": (COLS,),
        }  # fmt: skip
        self.client = client
        self.host = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        self.address = {name: client.upload(array) for name, array in self.host.items()}
        self.handle: dict[str, int] = {
            name: acl.create_tensor(shape, 0, None, 0, 2, shape, self.address[name]) for name, shape in shapes.items()
        }
        self.handle["normalizedShape"] = acl.create_int_array([COLS])
        self.handle["outputMask"] = acl.create_bool_array(mask)
        self.ordered = {p.name: self.handle[p.name] for p in OPS["layer_norm_backward"].params if p.name in self.handle}

    def plan(self, **changes: int) -> tuple[int, int, int]:
        return aclnn.aclnnLayerNormBackwardGetWorkspaceSize(**{**self.ordered, **changes})

    def result(self, name: str = "gradInputOut") -> np.ndarray:
        return self.client.download(self.address[name], self.host[name])

    def expected(self) -> np.ndarray:
        from backnorm.ops.layer_norm.reference import reference

        return reference({**self.host, "normalizedShape": (COLS,)})["gradInputOut"]


@pytest.fixture
def layer_norm(ready: None) -> Iterator[LayerNorm]:
    with Client() as client:
        yield LayerNorm(client)
        client.release.clear()  # finalize cleans up what a test broke on purpose


def message() -> str:
    return acl.get_recent_err_msg() or ""


def run(workspace: int, size: int, executor: int, stream: int = 0) -> int:
    return aclnn.aclnnLayerNormBackward(workspace, size, executor, stream)


def test_an_executor_is_used_up_by_its_first_run(layer_norm: LayerNorm) -> None:
    size, executor, ret = layer_norm.plan()
    assert ret == 0
    workspace = layer_norm.client.malloc(size)
    assert run(workspace, size, executor) == 0
    assert run(workspace, size, executor) == 161001
    assert "used up" in message()
    for _ in range(1100):  # and it stays known as such
        assert acl.destroy_acl_op_executor(layer_norm.plan()[1]) == 0
    assert run(workspace, size, executor) == 161001
    assert "used up" in message()
    assert acl.destroy_acl_op_executor(executor) == 561000
    assert acl.set_acl_op_executor_repeatable(executor) == 561000
    assert acl.rt.synchronize_stream(None) == 0
    np.testing.assert_allclose(layer_norm.result(), layer_norm.expected(), rtol=1e-5, atol=1e-5)


def test_a_failing_run_uses_the_executor_up_too(layer_norm: LayerNorm) -> None:
    size, executor, _ = layer_norm.plan()
    assert run(layer_norm.client.malloc(size), size - 1, executor) == 161002
    assert f"{size} bytes); got {size - 1}" in message()
    assert run(layer_norm.client.malloc(size), size, executor) == 161001
    assert "used up" in message()


def test_a_repeatable_executor_runs_until_it_is_destroyed(layer_norm: LayerNorm) -> None:
    size, executor, _ = layer_norm.plan()
    workspace = layer_norm.client.malloc(size)
    assert acl.set_acl_op_executor_repeatable(executor) == 0
    for _ in range(3):
        assert run(workspace, size, executor) == 0
    other = layer_norm.client.upload(layer_norm.host["input"] * 2 + 1)
    assert acl.set_input_tensor_addr(executor, 1, layer_norm.handle["input"], other) == 0
    assert run(workspace, size, executor) == 0
    assert acl.rt.synchronize_stream(None) == 0
    layer_norm.host["input"] = layer_norm.host["input"] * 2 + 1
    np.testing.assert_allclose(layer_norm.result(), layer_norm.expected(), rtol=1e-4, atol=1e-4)
    moved = layer_norm.client.malloc(ROWS * COLS * 4)
    assert acl.set_output_tensor_addr(executor, 0, layer_norm.handle["gradInputOut"], moved) == 0
    assert acl.get_raw_tensor_addr(layer_norm.handle["gradInputOut"]) == (moved, 0)
    assert run(workspace, size, executor) == 0
    assert acl.rt.synchronize_stream(None) == 0
    np.testing.assert_array_equal(layer_norm.client.download(moved, layer_norm.result()), layer_norm.result())
    assert acl.destroy_acl_op_executor(executor) == 0
    assert run(workspace, size, executor) == 161001
    assert acl.destroy_acl_op_executor(executor) == 561000


def test_a_failing_run_ends_a_repeatable_executor(layer_norm: LayerNorm) -> None:
    size, executor, _ = layer_norm.plan()
    assert acl.set_acl_op_executor_repeatable(executor) == 0
    assert run(0, size, executor) == 161001
    assert "workspace must not be null" in message()
    assert run(layer_norm.client.malloc(size), size, executor) == 161001
    assert "used up" in message()


def test_executor_handles(layer_norm: LayerNorm) -> None:
    assert run(0, 0, 0) == 161001
    assert run(0, 0, layer_norm.handle["input"]) == 161001
    assert "destroyed or foreign" in message()
    assert acl.set_acl_op_executor_repeatable(None) == 561103
    assert acl.set_acl_op_executor_repeatable(layer_norm.handle["input"]) == 561000
    assert acl.destroy_acl_op_executor(None) == 561103
    _, executor, _ = layer_norm.plan()
    assert acl.destroy_acl_op_executor(executor) == 0  # one that never ran
    size, executor, _ = layer_norm.plan()
    assert aclnn.aclnnGroupNormBackward(layer_norm.client.malloc(size), size, executor, 0) == 161001
    assert "aclnnLayerNormBackward's" in message()


def test_both_phases_need_the_runtime() -> None:
    acl.finalize()
    assert aclnn.aclnnLayerNormBackwardGetWorkspaceSize(*[0] * 11) == (0, 0, 100001)
    assert aclnn.aclnnLayerNormBackward(0, 0, 0, 0) == 100001


def test_an_executor_of_another_operator_is_used_up(layer_norm: LayerNorm) -> None:
    size, executor, _ = layer_norm.plan()
    workspace = layer_norm.client.malloc(size)
    assert aclnn.aclnnGroupNormBackward(workspace, size, executor, 0) == 161001
    assert run(workspace, size, executor) == 161001


def test_the_workspace_may_start_anywhere_in_its_allocation(layer_norm: LayerNorm) -> None:
    size, executor, _ = layer_norm.plan()
    room = np.full(size + 192, 0xA5, np.uint8)
    block = layer_norm.client.upload(room)
    assert run(block + 128, size, executor) == 0
    assert acl.rt.synchronize_stream(0) == 0
    after = layer_norm.client.download(block, room)
    assert (after[:128] == 0xA5).all()
    assert (after[128 + size :] == 0xA5).all()


def test_tensor_addresses_of_an_executor(layer_norm: LayerNorm) -> None:
    size, executor, _ = layer_norm.plan(weightOptional=0)
    tensor = layer_norm.handle["input"]
    assert acl.set_tensor_addr(None, 0, tensor, 64) == 561103
    assert acl.set_tensor_addr(executor, 0, None, 64) == 561103
    assert acl.set_tensor_addr(0xBAD, 0, tensor, 64) == 561000
    assert acl.set_tensor_addr(executor, 0, 0xBAD, 64) == 561000
    assert acl.set_tensor_addr(executor, 9, tensor, 64) == 161002
    assert "from 0 to 8" in message()
    assert acl.set_tensor_addr(executor, 0, layer_norm.handle["mean"], 64) == 161002
    assert "must be like the gradOut" in message()
    assert acl.get_raw_tensor_addr(layer_norm.handle["mean"]) == (layer_norm.address["mean"], 0)
    assert acl.set_input_tensor_addr(executor, 6, tensor, 64) == 161002
    assert acl.set_input_tensor_addr(executor, 4, tensor, 64) == 161002
    assert "absent weightOptional" in message()
    assert acl.set_output_tensor_addr(executor, 3, tensor, 64) == 161002
    assert acl.set_tensor_addr(executor, 8, layer_norm.handle["gradBiasOut"], 64) == 0
    assert run(layer_norm.client.malloc(size), size, executor) == 161002
    assert "gradBiasOut" in message()


def test_tensors_and_arrays_may_be_destroyed_after_phase_one(layer_norm: LayerNorm) -> None:
    size, executor, _ = layer_norm.plan()
    for name, handle in layer_norm.handle.items():
        destroy = {"normalizedShape": acl.destroy_int_array, "outputMask": acl.destroy_bool_array}
        assert destroy.get(name, acl.destroy_tensor)(handle) == 0
    assert run(layer_norm.client.malloc(size), size, executor) == 0
    assert acl.rt.synchronize_stream(None) == 0
    np.testing.assert_allclose(layer_norm.result(), layer_norm.expected(), rtol=1e-5, atol=1e-5)


def test_phase_one_looks_at_no_address(layer_norm: LayerNorm) -> None:
    for name in ("gradOut", "gradInputOut"):
        assert acl.set_raw_tensor_addr(layer_norm.handle[name], 0x10) == 0
    assert layer_norm.plan()[2] == 0


def test_a_raw_address_counts_from_the_next_phase_one(layer_norm: LayerNorm) -> None:
    size, executor, _ = layer_norm.plan()
    assert acl.set_raw_tensor_addr(layer_norm.handle["gradOut"], 0x10) == 0
    assert run(layer_norm.client.malloc(size), size, executor) == 0
    _, executor, _ = layer_norm.plan()
    assert run(layer_norm.client.malloc(size), size, executor) == 161002


@pytest.mark.parametrize("name", ["gradOut", "input", "mean", "rstd", "weightOptional", "gradInputOut", "gradBiasOut"])
@pytest.mark.parametrize("fault", ["null", "freed", "short", "wild", "host"])
def test_bad_data_is_found_before_anything_is_queued(layer_norm: LayerNorm, name: str, fault: str) -> None:
    address = {
        "null": 0,
        "freed": layer_norm.address[name],
        "short": layer_norm.client.malloc(layer_norm.host[name].nbytes - 4),
        "wild": 0x10,
        "host": layer_norm.host[name].ctypes.data,
    }[fault]
    if fault == "freed":
        assert acl.rt.free(address) == 0
    assert acl.set_raw_tensor_addr(layer_norm.handle[name], address) == 0
    size, executor, _ = layer_norm.plan()
    before = runtime.stream(0).queued
    assert run(layer_norm.client.malloc(size), size, executor) == 161002
    text = message()
    assert text.startswith(f"aclnnLayerNormBackward: {name} must lie inside one live device allocation")
    word = {"null": "null", "freed": "freed before", "short": "4 bytes past", "wild": "no device", "host": "no device"}
    assert word[fault] in text
    assert runtime.stream(0).queued == before


def test_a_view_that_leaves_its_allocation_through_strides_or_offset(layer_norm: LayerNorm) -> None:
    for strides, offset in (((COLS + 1, 1), 0), ((COLS, 1), 1), ((COLS, 1), -1), ((-COLS, 1), 0), ((10**15, 1), 0)):
        bent = acl.create_tensor((ROWS, COLS), 0, strides, offset, 2, [60], layer_norm.address["input"])
        size, executor, ret = layer_norm.plan(input=bent)
        assert ret == 0
        assert run(layer_norm.client.malloc(size), size, executor) == 161002
        assert "input" in message()


@pytest.mark.parametrize("freed", [False, True])
def test_an_offset_into_another_allocation_leaves_its_own(layer_norm: LayerNorm, freed: bool) -> None:
    base, other = layer_norm.client.malloc(64), layer_norm.address["input"]
    if freed:
        assert acl.rt.free(base) == 0
    bent = acl.create_tensor((ROWS, COLS), 0, None, (other - base) // 4, 2, [60], base)
    size, executor, _ = layer_norm.plan(input=bent)
    assert run(layer_norm.client.malloc(size), size, executor) == 161002
    assert ("freed before" if freed else "its allocation") in message()


def test_a_dead_handle_is_never_taken_for_a_shape(layer_norm: LayerNorm) -> None:
    assert layer_norm.plan()[2] == 0
    assert layer_norm.plan(normalizedShape=COLS)[2] == 161001  # a number that equals the shape, but no handle


@pytest.mark.parametrize("name", ["input", "gradInputOut", "mean"])
def test_the_workspace_must_be_apart_from_the_tensors(layer_norm: LayerNorm, name: str) -> None:
    room = layer_norm.client.malloc(4096)
    assert acl.set_raw_tensor_addr(layer_norm.handle[name], room + 64) == 0
    size, executor, _ = layer_norm.plan()
    assert run(room, size, executor) == 161002
    assert f"workspace must be apart from {name}" in message()
    _, executor, _ = layer_norm.plan()
    assert run(room + 2048, size, executor) == 0


def test_the_stride_of_a_single_element_is_no_matter(layer_norm: LayerNorm) -> None:
    big = 2**62
    outs = {"gradInputOut": acl.create_tensor((1, COLS), 0, (big, 1), 0, 2, [10], layer_norm.address["gradInputOut"])}
    for name in ("gradOut", "input"):
        outs[name] = acl.create_tensor((1, COLS), 0, (big, 1), 0, 2, [10], layer_norm.address[name])
    for name in ("mean", "rstd"):
        outs[name] = acl.create_tensor((1, 1), 0, (big, big), 0, 2, [1], layer_norm.address[name])
    size, executor, ret = layer_norm.plan(**outs)
    assert ret == 0
    assert run(layer_norm.client.malloc(size), size, executor) == 0
    assert acl.rt.synchronize_stream(0) == 0
    np.testing.assert_allclose(layer_norm.result()[0], layer_norm.expected()[0], rtol=1e-5, atol=1e-5)


def test_a_shape_beyond_computing_is_refused_with_a_code(ready: None) -> None:
    n = 2**61
    mask = acl.create_bool_array([False, True, True])
    shape = acl.create_int_array([n])

    def tensor(*dims: int) -> int:
        return acl.create_tensor(dims, 0, [0] * len(dims), 0, 2, [1], 0x1000)

    def packed(*dims: int) -> int:
        return acl.create_tensor(dims, 0, None, 0, 2, [1], 0x1000)

    ret = aclnn.aclnnLayerNormBackwardGetWorkspaceSize(
        tensor(1, n), tensor(1, n), shape, tensor(1), tensor(1), 0, 0, mask, 0, packed(n), packed(n)
    )[2]
    assert ret == 561002
    assert re.search("workspaceSize must fit 63 bits|at most 2147418112 on a GPU; got 2305843009213693952", message())


def test_the_value_of_bias_is_never_looked_at(layer_norm: LayerNorm) -> None:
    assert acl.set_raw_tensor_addr(layer_norm.handle["biasOptional"], 0) == 0
    size, executor, _ = layer_norm.plan()
    assert run(layer_norm.client.malloc(size), size, executor) == 0


@pytest.mark.parametrize("fault", ["freed", "short", "wild", "host"])
def test_bad_workspaces(layer_norm: LayerNorm, fault: str) -> None:
    size, executor, _ = layer_norm.plan()
    assert size > 0
    host = np.zeros(size, np.uint8)
    workspace = {
        "freed": layer_norm.client.malloc(size),
        "short": layer_norm.client.malloc(size - 1),
        "wild": 0x10,
        "host": host.ctypes.data,
    }[fault]
    if fault == "freed":
        assert acl.rt.free(workspace) == 0
    assert run(workspace, size, executor) == 161002
    assert "workspace must be live device memory" in message()


def test_a_larger_workspace_is_fine_and_only_its_head_is_used(layer_norm: LayerNorm) -> None:
    size, executor, _ = layer_norm.plan()
    poison = np.full(size + 100, 0xA5, np.uint8)
    workspace = layer_norm.client.upload(poison)
    assert run(workspace, size + 100, executor) == 0
    assert acl.rt.synchronize_stream(None) == 0
    after = layer_norm.client.download(workspace, poison)
    assert (after[size:] == 0xA5).all()
    assert (after[:size] != 0xA5).any()


def test_a_workspace_freed_before_synchronize_is_found_out(layer_norm: LayerNorm) -> None:
    size, executor, _ = layer_norm.plan()
    workspace = layer_norm.client.malloc(size)
    go = threading.Event()
    queue_python(0, lambda: go.wait(20))
    assert run(workspace, size, executor) == 0
    assert acl.rt.free(workspace) == 0
    go.set()
    assert acl.rt.synchronize_stream(None) == 500000
    assert "aclnnLayerNormBackward was queued with the memory at" in message()


@pytest.mark.parametrize("name", ["gradOut", "gradInputOut"])
def test_a_tensor_freed_before_synchronize_is_found_out(layer_norm: LayerNorm, name: str) -> None:
    size, executor, _ = layer_norm.plan()
    assert run(layer_norm.client.malloc(size), size, executor) == 0
    assert acl.rt.free(layer_norm.address[name]) == 0
    assert acl.rt.synchronize_stream(None) == 500000
    assert f"{layer_norm.address[name]:#x}" in message()


def test_streams_of_phase_two(layer_norm: LayerNorm) -> None:
    mine, _ = acl.rt.create_context(0)
    theirs, _ = acl.rt.create_stream()
    assert acl.rt.set_device(0) == 0
    for stream, words in ((theirs, "another context"), (0xBAD, "destroyed or foreign")):
        size, executor, _ = layer_norm.plan()
        assert run(layer_norm.client.malloc(size), size, executor, stream) == 361001
        assert words in message()
    assert mine


def test_work_counts_only_after_a_synchronize(layer_norm: LayerNorm) -> None:
    stream, _ = acl.rt.create_stream()
    before = layer_norm.result()
    go = threading.Event()
    queue_python(stream, lambda: go.wait(20))
    size, executor, _ = layer_norm.plan()
    assert run(layer_norm.client.malloc(size), size, executor, stream) == 0
    np.testing.assert_array_equal(layer_norm.result(), before)
    go.set()
    assert acl.rt.synchronize_stream(stream) == 0
    np.testing.assert_allclose(layer_norm.result(), layer_norm.expected(), rtol=1e-5, atol=1e-5)


def test_an_all_false_mask_does_nothing_and_needs_nothing(layer_norm: LayerNorm) -> None:
    mask = acl.create_bool_array([False] * 3)
    for name in ("gradOut", "input", "gradInputOut"):
        assert acl.set_raw_tensor_addr(layer_norm.handle[name], 0) == 0
    size, executor, ret = layer_norm.plan(outputMask=mask, gradInputOut=0, gradWeightOut=0, gradBiasOut=0xDEAD)
    assert (size, ret) == (0, 0)
    assert run(0, 0, executor) == 0
    assert acl.rt.synchronize_stream(None) == 0


@pytest.mark.parametrize("target", ["gradOut", "input"])
def test_an_output_may_lie_exactly_on_an_input(layer_norm: LayerNorm, target: str) -> None:
    expected = layer_norm.expected()
    assert acl.set_raw_tensor_addr(layer_norm.handle["gradInputOut"], layer_norm.address[target]) == 0
    size, executor, _ = layer_norm.plan()
    assert run(layer_norm.client.malloc(size), size, executor) == 0
    assert acl.rt.synchronize_stream(None) == 0
    np.testing.assert_allclose(layer_norm.result(target), expected, rtol=1e-5, atol=1e-5)


def test_empty_reductions_fill_with_zeros_and_leave_the_empty_alone(ready: None) -> None:
    cases: list[tuple[str, dict[str, Any], dict[str, tuple[int, ...]]]] = [
        ("layer_norm_backward",
         {"gradOut": (0, 4), "input": (0, 4), "normalizedShape": (4,), "mean": (0, 1), "rstd": (0, 1),
          "weightOptional": (4,), "biasOptional": None, "outputMask": (True,) * 3},
         {"gradInputOut": (0, 4), "gradWeightOut": (4,), "gradBiasOut": (4,)}),
        ("layer_norm_backward",
         {"gradOut": (3, 0), "input": (3, 0), "normalizedShape": (0,), "mean": (3, 1), "rstd": (3, 1),
          "weightOptional": (0,), "biasOptional": None, "outputMask": (True,) * 3},
         {"gradInputOut": (3, 0), "gradWeightOut": (0,), "gradBiasOut": (0,)}),
        ("group_norm_backward",
         {"gradOut": (2, 4, 0), "input": (2, 4, 0), "mean": (2, 2), "rstd": (2, 2), "gamma": (4,),
          "N": 2, "C": 4, "HxW": 0, "group": 2, "outputMask": (True,) * 3},
         {"gradInput": (2, 4, 0), "gradGammaOut": (4,), "gradBetaOut": (4,)}),
        ("group_norm_backward",
         {"gradOut": (0, 4, 5), "input": (0,), "mean": (0,), "rstd": (0,), "gamma": None,
          "N": 0, "C": 4, "HxW": 5, "group": 2, "outputMask": (True,) * 3},
         {"gradInput": (0,), "gradGammaOut": (4,), "gradBetaOut": (4,)}),
        ("batch_norm_backward_reduce",
         {"gradOut": (0, 3, 5), "input": (0, 3, 5), "mean": (3,), "invstd": (3,), "weight": None,
          "inputG": True, "weightG": True, "biasG": True},
         {"sumDy": (3,), "sumDyXmu": (3,), "gradWeight": (3,), "gradBias": (3,)}),
    ]  # fmt: skip
    rng = np.random.default_rng(0)
    numbers = ("normalizedShape", "outputMask")
    for name, inputs, outputs in cases:
        op = OPS[name]
        with Client() as client:
            handles: dict[str, Any] = {}
            addresses: dict[str, int] = {}
            layouts = {}
            for key, value in {**inputs, **outputs}.items():
                if isinstance(value, tuple) and key not in numbers:
                    layouts[key] = lay_out(value, np.float32, "packed", rng)
                    addresses[key] = client.upload(layouts[key].base)
                    # Data that is not looked at may be null.
                    handles[key] = client.tensor(layouts[key], addresses[key] if key in outputs else 0)
                else:
                    handles[key] = client.handle(value)
            size, executor, ret = getattr(aclnn, f"{op.c_name}GetWorkspaceSize")(**handles)
            assert (size, ret) == (0, 0), message()
            assert getattr(aclnn, op.c_name)(0, 0, executor, 0) == 0, message()
            assert acl.rt.synchronize_stream(0) == 0
            for key, shape in outputs.items():
                after = client.download(addresses[key], layouts[key].base)
                assert not layouts[key].view(after).any()
                assert (after.view(np.uint8)[np.prod(shape, dtype=int) * 4 :] == 0xA5).all()


@pytest.mark.parametrize("value", [0, 1, 2, 3])
def test_determinism_options_change_nothing(layer_norm: LayerNorm, value: int) -> None:
    assert acl.rt.set_sys_param_opt(0, value) == 0
    assert acl.rt.ctx_set_sys_param_opt(0, value) == 0
    bits = []
    for _ in range(2):
        size, executor, _ = layer_norm.plan()
        assert run(layer_norm.client.malloc(size), size, executor) == 0
        assert acl.rt.synchronize_stream(None) == 0
        bits.append(b"".join(layer_norm.result(n).tobytes() for n in ("gradInputOut", "gradWeightOut", "gradBiasOut")))
    assert bits[0] == bits[1]


def test_wrong_arity_or_type_is_a_type_error(layer_norm: LayerNorm) -> None:
    for call in (
        lambda: aclnn.aclnnLayerNormBackward(0, 0, 0),
        lambda: aclnn.aclnnLayerNormBackward(0, -1, 0, 0),
        lambda: aclnn.aclnnLayerNormBackwardGetWorkspaceSize(*["x"] * 11),
        lambda: aclnn.aclnnLayerNormBackwardGetWorkspaceSize(1),
        lambda: aclnn.aclnnGroupNormBackwardGetWorkspaceSize(0, 0, 0, 0, 0, 2**63, 1, 1, 1, 0, 0, 0, 0),
        lambda: aclnn.aclnnBatchNormReduceBackwardGetWorkspaceSize(0, 0, 0, 0, 0, "yes", 1, 1, 0, 0, 0, 0),
    ):
        with pytest.raises(TypeError):
            call()


def test_names_and_signatures_are_those_of_c() -> None:
    import inspect

    for op in OPS.values():
        phase_one = getattr(aclnn, f"{op.c_name}GetWorkspaceSize")
        names = [p.name for p in op.params if p.kind != "out_pointer"]
        assert list(inspect.signature(phase_one).parameters) == names
        phase_two = getattr(aclnn, op.c_name)
        assert list(inspect.signature(phase_two).parameters) == ["workspace", "workspaceSize", "executor", "stream"]
        assert phase_one.__doc__
