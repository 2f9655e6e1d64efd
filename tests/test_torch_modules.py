"""LayerNorm, GroupNorm and SyncBatchNorm as modules: torch.nn's behaviour, float64's gradients."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402

import backnorm.torch  # noqa: E402
from backnorm.torch import GroupNorm, LayerNorm, SyncBatchNorm, convert  # noqa: E402
from backnorm.torch.channels import dense, each_element, local_statistics  # noqa: E402

from .torch_truth import group_norm_truth, judge, layer_norm_truth, random, to_numpy  # noqa: E402

nn = torch.nn
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def _randomize(module: Any) -> Any:
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(random(parameter.shape, 10 + i))
    return module


def _gradients(module: Any, x: Any, dy: Any) -> dict[str, Any]:
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    module.zero_grad()
    y = module(leaf)
    y.backward(dy)
    return {"output": y.detach(), "input": leaf.grad, **{name: p.grad for name, p in module.named_parameters()}}


# --- against float64 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}, {"eps": 0.1}])
@pytest.mark.parametrize(
    ("shape", "normalized"), [((40, 65), (65,)), ((3, 4, 5, 6), (5, 6)), ((9,), (9,)), ((7, 1), 1)]
)
def test_layer_norm_lies_within_the_bound(shape: Any, normalized: Any, options: dict[str, Any], dtype: Any) -> None:
    module = _randomize(LayerNorm(normalized, **options)).to(dtype)
    x, dy = random(shape, 1, dtype, 2.0, 1.0), random(shape, 2, dtype)
    found = _gradients(module, x, dy)
    truth = layer_norm_truth(dy, x, module.normalized_shape, module.weight, module.bias, module.eps)
    for name in ("input", "weight", "bias"):
        if name in found:
            assert found[name].dtype == dtype
            assert judge(found[name], *truth[name]) <= 1, name
    expected = nn.functional.layer_norm(x, module.normalized_shape, module.weight, module.bias, module.eps)
    assert torch.equal(found["output"], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"eps": 0.1}])
@pytest.mark.parametrize("shape", [(5, 12, 7), (3, 12, 4, 5), (2, 12, 2, 3, 4), (6, 12)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_group_norm_lies_within_the_bound(shape: Any, options: Any, dtype: Any, channels_last: bool) -> None:
    module = _randomize(GroupNorm(3, 12, **options)).to(dtype)
    x, dy = random(shape, 1, dtype, 2.0, 1.0), random(shape, 2, dtype)
    if channels_last:
        x = dense(x.movedim(1, -1).contiguous().movedim(-1, 1))
    found = _gradients(module, x, dy)
    truth = group_norm_truth(dy, x, 3, module.weight, module.bias, module.eps)
    for name in ("input", "weight", "bias"):
        if name in found:
            assert found[name].dtype == dtype
            assert judge(found[name], *truth[name]) <= 1, name
    expected = nn.functional.group_norm(x, 3, module.weight, module.bias, module.eps)
    assert torch.equal(found["output"], expected)
    assert found["output"].stride() == expected.stride()
    assert found["input"].stride() == x.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_beat_torch_nn(dtype: Any) -> None:
    """At 4096 rows torch's own weight gradients are off by percents; ours are rounded once."""
    rows, cols = 4096, 64
    x, dy = random((rows, cols), 1, dtype, 1.0, 3.0), random((rows, cols), 2, dtype).abs()
    module = _randomize(LayerNorm(cols)).to(dtype)
    theirs = nn.LayerNorm(cols).to(dtype)
    theirs.load_state_dict(module.state_dict())
    truth = layer_norm_truth(dy, x, (cols,), module.weight, module.bias)
    ours, torchs = _gradients(module, x, dy), _gradients(theirs, x, dy)
    for name in ("input", "weight", "bias"):
        golden = truth[name][0]
        error, other = (abs(to_numpy(f[name]).astype("f8") - golden).max() / abs(golden).max() for f in (ours, torchs))
        assert judge(ours[name], *truth[name]) <= 1
        assert error * (1 if name == "input" else 4) < other, (name, error, other)


# --- as torch.nn's ----------------------------------------------------------------------------------------------------

PAIRS = [
    (nn.LayerNorm, LayerNorm, (6,), {}, (4, 5, 6)),
    (nn.LayerNorm, LayerNorm, ([5, 6],), {"bias": False}, (4, 5, 6)),
    (nn.LayerNorm, LayerNorm, (6,), {"elementwise_affine": False}, (4, 6)),
    (nn.GroupNorm, GroupNorm, (2, 6), {}, (4, 6, 5)),
    (nn.GroupNorm, GroupNorm, (3, 6), {"affine": False, "eps": 1e-3}, (4, 6, 5, 2)),
    (nn.SyncBatchNorm, SyncBatchNorm, (6,), {}, (4, 6, 5)),
    (nn.SyncBatchNorm, SyncBatchNorm, (6,), {"momentum": None, "affine": False}, (4, 6)),
    (nn.SyncBatchNorm, SyncBatchNorm, (6,), {"track_running_stats": False}, (4, 6, 2, 3)),
]
pairs = pytest.mark.parametrize(("theirs", "ours", "arguments", "options", "shape"), PAIRS)


@pairs
def test_state_dicts_load_both_ways(theirs: Any, ours: Any, arguments: Any, options: Any, shape: Any) -> None:
    a, b = _randomize(theirs(*arguments, **options)), ours(*arguments, **options)
    assert repr(a) == repr(b)
    b.load_state_dict(a.state_dict())
    theirs(*arguments, **options).load_state_dict(b.state_dict())
    x = random(shape, 1)
    for mode in (True, False):
        # Without a group there is nothing to synchronize, and torch.nn's SyncBatchNorm runs on CPUs too.
        assert torch.equal(a.train(mode)(x), b.train(mode)(x))
    for first, second in zip(a.state_dict().values(), b.state_dict().values()):
        assert torch.equal(first, second)
    assert torch.equal(pickle.loads(pickle.dumps(b))(x), b(x))
    assert torch.equal(copy.deepcopy(b)(x), b(x))


@pairs
def test_float64_passes_gradcheck_and_gradgradcheck(
    theirs: Any, ours: Any, arguments: Any, options: Any, shape: Any
) -> None:
    module = _randomize(ours(*arguments, **options)).double().train()
    if isinstance(module, SyncBatchNorm) and module.momentum is None:
        module.momentum = 0.1  # else every call of the check has another momentum
    x = random(shape, 1, torch.float64).requires_grad_()
    parameters = tuple(p.detach().requires_grad_() for p in module.parameters())
    names = [name for name, _ in module.named_parameters()]

    def function(x: Any, *values: Any) -> Any:
        return torch.func.functional_call(module, dict(zip(names, values)), (x,))

    assert torch.autograd.gradcheck(function, (x, *parameters))
    assert torch.autograd.gradgradcheck(function, (x, *parameters))


@pytest.mark.parametrize(("theirs", "ours", "arguments", "options", "shape"), PAIRS[:5])
@pytest.mark.parametrize("asked", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)])
def test_only_what_requires_a_gradient_gets_one(
    theirs: Any, ours: Any, arguments: Any, options: Any, shape: Any, asked: Any
) -> None:
    x, dy = random(shape, 1), random(shape, 2)
    found = []
    for cls in (theirs, ours):
        module = _randomize(cls(*arguments, **options))
        tensors = [x.clone(), module.weight, module.bias]
        for tensor, ask in zip(tensors, asked):
            if tensor is not None:
                tensor.requires_grad_(bool(ask))
        y = module(tensors[0])
        if y.requires_grad:
            y.backward(dy)
        found.append([None if t is None else t.grad for t in tensors])
    for a, b in zip(*found):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("theirs", "ours", "arguments", "options", "shape"), PAIRS[:5])
def test_upstream_gradients_of_any_strides(theirs: Any, ours: Any, arguments: Any, options: Any, shape: Any) -> None:
    x = random(shape, 1)
    module, other = _randomize(ours(*arguments, **options)), _randomize(theirs(*arguments, **options))
    upstreams = [
        random(shape[-1:], 2).expand(shape),
        random(tuple(reversed(shape)), 3).permute(*reversed(range(len(shape)))),
        random((*shape[:-1], 2 * shape[-1]), 4)[..., ::2],
        torch.ones(()).expand(shape),
    ]
    for dy in upstreams:
        a, b = _gradients(module, x, dy), _gradients(other, x, dy)
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-5)
    transposed = x.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(_gradients(module, transposed, dy)["input"], a["input"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("theirs", "ours", "arguments", "options", "shape"), PAIRS[:5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_gives_the_same_types(
    theirs: Any, ours: Any, arguments: Any, options: Any, shape: Any, dtype: Any
) -> None:
    x = random(shape, 1, dtype)
    found = []
    for cls in (theirs, ours):
        module = _randomize(cls(*arguments, **options))
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x.requires_grad_())
        (y.float() * random(shape, 2)).sum().backward()
        found.append([y, x.grad, *[p.grad for p in module.parameters()]])
        x.grad = None
    for a, b in zip(*found):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def test_hooks_double_use_and_conversion_in_place() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Unflatten(1, (6, 1)), nn.GroupNorm(2, 6), nn.Flatten())
    _randomize(model)
    seen: list[str] = []
    model[1].register_forward_hook(lambda module, inputs, output: seen.append("forward"))
    model[1].register_full_backward_hook(lambda module, grads, outputs: seen.append("backward"))
    model[3].weight.register_hook(lambda gradient: seen.append("weight"))
    twin = copy.deepcopy(model).double()
    parameters = list(model.parameters())
    assert convert(model) is model
    assert (type(model[1]), type(model[3]), type(model[0])) == (LayerNorm, GroupNorm, nn.Linear)
    assert all(a is b for a, b in zip(parameters, model.parameters()))
    x = random((5, 6), 1)
    backnorm.torch.reset_stats()
    model(model(x)).backward(random((5, 6), 2))
    assert seen.count("forward") == 2
    assert seen.count("backward") == 2
    assert seen.count("weight") >= 1
    assert backnorm.torch.stats()["layer_norm_backward"] == {"backnorm": 2}
    twin(twin(x.double())).backward(random((5, 6), 2).double())
    for a, b in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-4)

    class Derived(nn.LayerNorm):
        pass

    assert type(convert(Derived(3))) is Derived
    assert type(convert(nn.LayerNorm(3))) is LayerNorm
    assert type(convert(nn.SyncBatchNorm(3))) is SyncBatchNorm
    converted = SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm1d(4, affine=False)))
    assert [type(module) for module in converted] == [SyncBatchNorm, SyncBatchNorm]


def test_double_backward_in_float32() -> None:
    for ours, truth, shape in (
        (lambda x, w: backnorm.torch.layer_norm(x, (6,), w), lambda x, w: nn.functional.layer_norm(x, (6,), w), (4, 6)),
        (lambda x, w: backnorm.torch.group_norm(x, 2, w), lambda x, w: nn.functional.group_norm(x, 2, w), (4, 6, 3)),
    ):
        results = []
        for function, dtype in ((ours, torch.float32), (truth, torch.float64)):
            x, w, dy = (random(s, i, dtype).requires_grad_() for i, s in enumerate((shape, (6,), shape)))
            dx, dw = torch.autograd.grad(function(x, w), (x, w), dy, create_graph=True)
            results.append(torch.autograd.grad(dx.square().sum() + dw.pow(3).sum(), (x, w, dy)))
        for a, b in zip(*results):
            assert float((a - b).abs().max()) <= 1e-4 * float(b.abs().max())


def test_functional_transforms() -> None:
    module = _randomize(LayerNorm(6))
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    x = random((5, 3, 6), 1)

    def loss(parameters: Any, x: Any, cls: Any = module) -> Any:
        return torch.func.functional_call(cls, parameters, (x,)).pow(3).sum()

    other = nn.LayerNorm(6)
    ours = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    theirs = torch.func.vmap(torch.func.grad(lambda p, x: loss(p, x, other)), in_dims=(None, 0))(parameters, x)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-4)
    t = random((3, 6), 2)
    mine = torch.func.jvp(lambda x: loss(parameters, x), (x[0],), (t,))[1]
    torch.testing.assert_close(mine, torch.func.jvp(lambda x: loss(parameters, x, other), (x[0],), (t,))[1])


def test_checkpoints_no_grad_and_empty_batches() -> None:
    from torch.utils.checkpoint import checkpoint

    module, x = _randomize(LayerNorm(6)), random((4, 6), 1)
    plain = _gradients(module, x, random((4, 6), 2))
    for reentrant in (False, True):
        wrapped = _Wrapped(lambda v, r=reentrant: checkpoint(module, v, use_reentrant=r), module)
        again = _gradients(wrapped, x, random((4, 6), 2))
        assert all(torch.equal(plain[name], again[name]) for name in plain)
    with torch.no_grad():
        assert not module(x).requires_grad
    empty = _gradients(module, torch.empty(0, 6), torch.empty(0, 6))
    assert not empty["weight"].any()
    leaf = torch.empty(0, 4, 3, requires_grad=True)
    backnorm.torch.group_norm(leaf, 2).sum().backward()
    assert leaf.grad.shape == (0, 4, 3)


class _Wrapped:
    """A function with the parameters of a module."""

    def __init__(self, forward: Any, module: Any) -> None:
        self._forward, self.named_parameters, self.zero_grad = forward, module.named_parameters, module.zero_grad

    def __call__(self, x: Any) -> Any:
        return self._forward(x)


def test_what_is_wrong_is_told_as_torch_does() -> None:
    with pytest.raises(RuntimeError, match="normalized_shape"):
        LayerNorm(6)(random((4, 5), 1))
    with pytest.raises(RuntimeError, match="num_groups"):
        backnorm.torch.group_norm(random((4, 5), 1), 2)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        backnorm.torch.group_norm(random((1, 4), 1), 4)
    with pytest.raises(ValueError, match="at least 2 axes; got 1"):
        SyncBatchNorm(4)(random((4,), 1))
    with pytest.raises(ValueError, match="input must have 4 channels; got 5"):
        SyncBatchNorm(4)(random((3, 5), 1))
    x = random((2,) * 9, 1).requires_grad_()
    LayerNorm(2)(x).sum().backward()  # more axes than the operators take: aten's
    assert x.grad is not None


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    yield lambda model: torch.compile(model, fullgraph=True)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore")  # inductor's own
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_modules_reach_our_operators(compiler: Any, dtype: Any) -> None:
    model = nn.Sequential(LayerNorm(6), nn.Unflatten(1, (6, 1)), GroupNorm(2, 6))
    _randomize(model).to(dtype)
    x, dy = random((50, 6), 1, dtype), random((50, 6, 1), 2, dtype)
    eager = _gradients(model, x, dy)
    backnorm.torch.reset_stats()
    compiled = _gradients(compiler(model), x, dy)
    assert backnorm.torch.stats()["layer_norm_backward"] == {"backnorm": 1}
    assert backnorm.torch.stats()["group_norm_backward"] == {"backnorm": 1}
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    for a, b in zip(eager.values(), compiled.values()):
        assert float((a.double() - b.double()).abs().max()) <= tolerance * float(a.double().abs().max())


# --- PyTorch's own tests of its modules -------------------------------------------------------------------------------


def _inputs_of_torch() -> list[Any]:
    try:
        from torch.testing._internal.common_modules import module_db
    except Exception as error:  # it imports what torch does not bring along
        return [pytest.param(None, None, marks=pytest.mark.skip(reason=f"PyTorch's module tests: {error}"))]
    ours = {nn.LayerNorm: LayerNorm, nn.GroupNorm: GroupNorm}
    return [pytest.param(info, ours[info.module_cls], id=info.name) for info in module_db if info.module_cls in ours]


@pytest.mark.parametrize(("info", "cls"), _inputs_of_torch())
@pytest.mark.filterwarnings("ignore")
def test_pytorchs_own_samples(info: Any, cls: Any) -> None:
    """What test_modules.py of PyTorch does with its samples: forward, gradients and gradients of gradients in float64,
    and float32 beside torch.nn's."""
    number = 0
    for dtype in (torch.float64, torch.float32):
        inputs = {"device": "cpu", "dtype": dtype, "requires_grad": True, "training": True}
        for sample in info.module_inputs_func(info, **inputs):
            arguments, keywords = sample.constructor_input.args, sample.constructor_input.kwargs
            module = _randomize(cls(*arguments, **keywords, dtype=dtype))
            theirs = info.module_cls(*arguments, **keywords, dtype=dtype)
            theirs.load_state_dict(module.state_dict())
            (x,) = sample.forward_input.args
            y = module(x)
            torch.testing.assert_close(y, theirs(x))
            if sample.reference_fn is not None:
                torch.testing.assert_close(y, sample.reference_fn(module, list(module.parameters()), x))
            if dtype == torch.float64:
                values = (x, *module.parameters())
                assert torch.autograd.gradcheck(lambda *v, m=module: m(v[0]), values)
                assert torch.autograd.gradgradcheck(lambda *v, m=module: m(v[0]), values)
            else:
                dy = random(y.shape, 3)
                a, b = _gradients(module, x, dy), _gradients(theirs, x, dy)
                for name in a:
                    torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-4)
            number += 1
    assert number >= 10


def _constructor_tests() -> list[Any]:
    try:
        from torch.testing._internal import common_nn  # noqa: F401
    except Exception as error:
        return [pytest.param(None, marks=pytest.mark.skip(reason=f"PyTorch's module tests: {error}"))]
    return [
        {"constructor": cls, "constructor_args": arguments, "input_size": size, "fullname": name}
        for name, cls, arguments, size in (
            ("LayerNorm_1d", LayerNorm, ([5],), (4, 5, 5)),
            ("LayerNorm_3d", LayerNorm, ([2, 2, 5], 1e-3, False), (4, 2, 2, 5)),
            ("GroupNorm_1d", GroupNorm, (3, 6, 1e-3), (4, 6, 5)),
            ("GroupNorm_instances", GroupNorm, (3, 3, 1e-3, False), (4, 3, 2, 3)),
            ("SyncBatchNorm", SyncBatchNorm, (3,), (4, 3, 2, 2)),
        )
    ]


@pytest.mark.parametrize("arguments", _constructor_tests(), ids=lambda a: a["fullname"] if a else "none")
@pytest.mark.filterwarnings("ignore")
def test_pytorchs_own_module_test(arguments: dict[str, Any]) -> None:
    """PyTorch's NewModuleTest: non-contiguous inputs and gradients, numerical Jacobians, double backward, pickling,
    conversions between types."""
    from torch.testing._internal import common_nn

    class Case(common_nn.NNTestCase):
        def runTest(self) -> None:
            common_nn.NewModuleTest(**arguments, check_eval=True, default_dtype=torch.double)(self)

        def _get_parameters(self, module: Any) -> Any:
            parameters = list(module.parameters())
            return parameters, [p.grad for p in parameters]

        def _forward(self, module: Any, input: Any) -> Any:
            return module(*input) if isinstance(input, tuple) else module(input)

        def _backward(self, module: Any, input: Any, output: Any, grad_output: Any, create_graph: bool = False) -> Any:
            output.backward(grad_output, retain_graph=True, create_graph=create_graph)
            inputs = input if isinstance(input, tuple) else (input,)
            grads = tuple(i.grad.data if i.grad is not None else None for i in inputs)
            return grads if isinstance(input, tuple) else grads[0]

        def _zero_grad_input(self, input: Any) -> None:
            for value in input if isinstance(input, tuple) else (input,):
                if value.requires_grad and value.grad is not None:
                    value.grad.data.zero_()

        def _zero_grad_parameters(self, module: Any) -> None:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.data.zero_()

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.double)
    try:
        Case().runTest()
    finally:
        torch.set_default_dtype(default)


# --- the kernels beside the reduce operator ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0.0, 1000.0])
@pytest.mark.parametrize(
    ("shape", "channels_last"),
    [((5, 3, 7, 9), False), ((5, 3, 7, 9), True), ((3, 20, 2500), False), ((1000, 37), False), ((70, 16, 3), True),
     ((1, 1, 1), False), ((2, 300, 5, 40), True), ((40, 5, 33, 31), False)],
)  # fmt: skip
def test_statistics_and_elements(shape: Any, channels_last: bool, shift: float, dtype: Any) -> None:
    x, dy = random(shape, 1, dtype, 2.0, shift), random(shape, 2, dtype)
    if channels_last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    dy = dense(dy, like=x)
    x = dense(x)
    axes, by_channel = [a for a in range(x.ndim) if a != 1], [-1 if a == 1 else 1 for a in range(x.ndim)]
    count, mean, m2 = local_statistics(x)
    wide = x.double()
    assert float(count) == x.numel() / shape[1]
    true_mean, spread = wide.mean(axes), wide.var(axes, correction=0)
    # 8 float32 roundings of the deviations, as in the bound of every sum.
    deviations = (wide - true_mean.view(by_channel)).abs().mean(axes)
    assert bool(((mean - true_mean).abs() <= 8 * 2.0**-24 * deviations + 1e-12 * true_mean.abs()).all())
    assert bool(((m2 / count - spread).abs() <= 16 * 2.0**-24 * spread).all())
    table = random((4, shape[1]), 3)
    for upstream in (None, dy):
        out = each_element(x, upstream, table[0], table[1], None if upstream is None else table[2], table[3])
        m, a, b, c = (t.double().view(by_channel) for t in table)
        golden, terms = (wide - m) * a + c, (wide.abs() + m.abs()) * a.abs() + c.abs()
        if upstream is not None:
            golden, terms = golden + dy.double() * b, terms + dy.double().abs() * b.abs()
        assert out.stride() == x.stride()
        assert judge(out, golden.numpy(), terms.numpy()) <= 1


def test_forward_derivatives_of_a_backward_pass() -> None:
    layer, x, t = LayerNorm(6), random((3, 6), 1).requires_grad_(), random((3, 6), 2)
    y = layer(x)
    with forward_ad.dual_level():
        (ours,) = torch.autograd.grad(y, x, forward_ad.make_dual(torch.ones_like(y), t))
        tangent = forward_ad.unpack_dual(ours).tangent
    (expected,) = torch.autograd.grad(layer(x), x, t)
    torch.testing.assert_close(tangent, expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_torchs() -> None:
    layer, parts = LayerNorm(4), [random((2, 4), 1), random((3, 4), 2)]
    for part, result in zip(parts, layer(torch.nested.nested_tensor(parts)).unbind()):
        torch.testing.assert_close(result, torch.nn.functional.layer_norm(part, (4,)))


def test_convert_sync_batchnorm_changes_nothing_else() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(3), torch.nn.BatchNorm1d(3))
    converted = SyncBatchNorm.convert_sync_batchnorm(model)
    assert [type(layer) for layer in converted] == [torch.nn.LayerNorm, SyncBatchNorm]
