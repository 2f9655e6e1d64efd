"""Gradients of a LayerNorm from the statistics its forward pass saved, on NumPy arrays."""

import numpy as np

import backnorm

rng = np.random.default_rng(0)
x = rng.standard_normal((4, 768)).astype(np.float32)
weight = rng.standard_normal(768).astype(np.float32)
grad_out = rng.standard_normal((4, 768)).astype(np.float32)

mean = x.mean(axis=1, keepdims=True)
rstd = 1 / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5)

grad_input, grad_weight, grad_bias = backnorm.layer_norm_backward(grad_out, x, (768,), mean, rstd, weight)
print("grad_input ", grad_input.dtype, grad_input.shape)
print("grad_weight", grad_weight.dtype, grad_weight.shape)

# The gradient cannot move a row's mean: each of its rows sums to zero.
print("row sums   ", np.abs(grad_input.sum(axis=1)).max())

# A broken rule is an error with a status, the parameter and both values.
try:
    backnorm.layer_norm_backward(grad_out, x, (769,), mean, rstd, weight)
except backnorm.AclnnError as error:
    print(int(error.status), error.parameter, "|", error)
