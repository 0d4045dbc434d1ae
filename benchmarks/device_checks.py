"""What has to hold on a device before speed matters: numbers, determinism, capture, compilation."""

import itertools

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.device_session import Session, call, dense64
from tests.numerics import DENSE_ROUNDING, ROUNDED, make_weight, make_x, relative_error
from woq_triton import QuantScheme, embedding, linear, quantize
from woq_triton.backends import triton as backend

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCHEMES = [
    QuantScheme(bits, size, dim, symmetric)
    for bits in (4, 8)
    for size, dim, symmetric in (
        (128, 1, False),
        (32, 1, True),
        (64, 1, False),
        (-1, 1, False),
        (50, 1, True),
        (128, 0, False),
        (32, 0, True),
    )
]


def poison(session: Session, *shapes: tuple[int, ...]) -> None:
    """Leave NaN in memory that the next allocations of these shapes will get."""
    for shape in shapes:
        torch.full(shape, float("nan"), device=session.device)


def numerics(session: Session) -> dict[str, float]:
    """Every kernel, scheme and dtype against fp64, with fresh inputs and poisoned memory."""
    shapes = [(70, 300)] if session.dry else [(70, 300), (512, 1024), (1000, 4224)]
    token_counts = (1, 17) if session.dry else (1, 3, 8, 16, 17, 64, 130, 600)
    schemes = SCHEMES[:: 3 if session.dry else 1]
    worst: dict[str, float] = {}
    for (name, dtype), scheme, shape in itertools.product(DTYPES.items(), schemes, shapes):
        qweight = quantize(make_weight(*shape, dtype, seed=len(worst)), scheme).to(session.device)
        dense = dense64(qweight)
        bias = make_x(shape[0], dtype=dtype).to(session.device)
        for tokens in token_counts:
            x = make_x(tokens, shape[1], dtype=dtype, mean=3.0, seed=tokens).to(session.device)
            poison(session, (tokens, shape[0]), shape)
            error = relative_error(call(x, qweight, bias), x.double() @ dense.t() + bias.double())
            bound = ROUNDED[dtype] + DENSE_ROUNDING[dtype]
            session.expect(error < bound, f"linear {scheme} {name} {shape} M={tokens}: error {error:.2g}")
            worst[f"linear {name}"] = max(worst.get(f"linear {name}", 0.0), error)
        poison(session, shape)
        rebuilt = backend.dequantize(
            qweight.packed, qweight.scale, qweight.min, *qweight.op_scheme, torch.float32
        )
        ids = torch.tensor([0, shape[0] - 1, 3], device=session.device)
        rows = backend.embedding(
            ids, qweight.packed, qweight.scale, qweight.min, *qweight.op_scheme, torch.float32
        )
        for what, error in (
            ("dequantize", relative_error(rebuilt, dense)),
            ("embedding", relative_error(rows, dense[ids])),
        ):
            session.expect(error < 1e-6, f"{what} {scheme} {name} {shape}: error {error:.2g}")
            worst[what] = max(worst.get(what, 0.0), error)
    print("   largest relative errors: " + ", ".join(f"{k} {v:.2g}" for k, v in worst.items()))
    return worst


def determinism(session: Session) -> int:
    """Split-K sums in the same order every time."""
    shape = (64, 1024) if session.dry else (1024, 8192)
    qweight = quantize(make_weight(*shape, torch.float16), QuantScheme(4, 128)).to(session.device)
    x = make_x(1, shape[1], dtype=torch.float16).to(session.device)
    first, repeats = call(x, qweight), 2 if session.dry else 200
    same = all(torch.equal(call(x, qweight), first) for _ in range(repeats))
    session.expect(same, "results of one product differ from call to call")
    return repeats


def capture(session: Session) -> str:
    """A captured graph computes anew when it is replayed on other inputs."""
    if session.dry:
        return "needs a GPU"
    qweight = quantize(make_weight(512, 2048, torch.float16), QuantScheme(4, 128)).to("cuda")
    for tokens in (1, 16, 64):
        x = make_x(tokens, 2048, dtype=torch.float16).cuda()
        outs: list[Tensor] = []
        replay = measure.captured([lambda x=x, outs=outs: outs.append(linear(x, qweight))])  # type: ignore[misc]
        for seed in (2, 3):
            x.copy_(make_x(tokens, 2048, dtype=torch.float16, seed=seed))
            replay()
            session.expect(
                torch.equal(outs[-1], linear(x, qweight)), f"replay at M={tokens} differs from eager"
            )
    return "3 sizes"


def compiled(session: Session) -> str:
    """`torch.compile` without graph breaks gives what eager gives."""
    qweight = quantize(make_weight(128, 512, torch.float32), QuantScheme(4, 128)).to(session.device)

    def block(x: Tensor, ids: Tensor) -> Tensor:
        return torch.relu(linear(x, qweight)) @ embedding(ids, qweight)[:128]

    x, ids = make_x(4, 512).to(session.device), torch.arange(128, device=session.device)
    error = relative_error(torch.compile(block, fullgraph=True)(x, ids), block(x, ids).double())
    session.expect(error < 1e-5, f"compiled differs from eager by {error:.2g}")
    return "fullgraph"
