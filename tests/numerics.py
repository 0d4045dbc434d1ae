"""The error metric, the weights that tests use, and every numeric tolerance with its derivation."""

import torch
from torch import Tensor

HALF_STEP = 0.5 * (1 + 2**-12)
"""Largest reconstruction error in stored steps: half, and the rounding of the code in fp32: the quotient
(w - min) / scale of at most 255 carries three roundings of 2**-24 each, 4.6e-5 of a step."""

KERNEL = {torch.float32: 1e-5, torch.bfloat16: 1e-4, torch.float16: 1e-3}
"""Relative error of a linear with fp32 output against fp64, by the dtype of x, where codes reach the dot
exactly. fp32: K roundings of 2**-24 add up as sqrt(K), 4e-6 at K = 4096. bf16 and fp16: the products are
exact too, and sums of `magic + q` (128 for bf16, 1024 for fp16) amplify 2**-24 by the magic's share of the
accumulator, a few hundred for x of mean 3."""

ROUNDED = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}
"""The same where weights or x * scale are rounded to x's dtype: 2**-9 (bf16) and 2**-12 (fp16) at each
product, which the sum averages rather than amplifies."""

DENSE_ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
"""Relative error of a result rounded once to a dtype: 2**-24, 2**-9, 2**-12, and half again."""


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of the expected value, in fp64; 0 for empty tensors."""
    if expected.numel() == 0:
        assert actual.shape == expected.shape
        return 0.0
    actual, expected = actual.detach(), expected.detach().double()
    return float((actual.double() - expected).norm() / expected.norm())


def make_weight(
    out_features: int, in_features: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Tensor:
    """A weight that hides no fault: skewed, offset from zero, its groups differing by factors of ten."""
    generator = torch.Generator().manual_seed(seed)
    skewed = torch.rand(out_features, in_features, generator=generator) ** 2 - 0.2
    rows = 10 ** (2 * torch.rand(out_features, 1, generator=generator) - 1)
    # Runs of 16 columns share a scale, so that neighbouring groups of any size differ.
    runs = 10 ** (2 * torch.rand(1, -(-in_features // 16), generator=generator) - 1)
    columns = runs.repeat_interleave(16, dim=1)[:, :in_features]
    return ((skewed + 0.3) * rows * columns).to(dtype)


def make_x(*shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0, seed: int = 1) -> Tensor:
    """Activations, normal around a mean."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) + mean).to(dtype)
