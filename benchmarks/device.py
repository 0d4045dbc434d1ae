"""One script for a machine with a GPU: are the kernels right there, how fast are they, which tiles are best?

    python benchmarks/device.py               within 8 minutes in all
    python benchmarks/device.py --dry-run     everything on tiny shapes in Triton's interpreter, without a GPU

It needs torch, Triton and this repository; peers are measured if they are installed
(``pip install gemlite humming-kernels conch-triton-kernels torchao bitsandbytes hqq``). The numerics come
first and decide the exit status; no time is taken of a kernel that is wrong. A dry run's times are those of
the interpreter, mean nothing and are not written.
"""

import os
import sys
from pathlib import Path


def main() -> int:
    """Settle what has to be settled before torch and Triton are imported, and run."""
    root = Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(root), str(root / "kernels")]
    if "--dry-run" in sys.argv:
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["WOQ_TRITON_IMPL"] = "triton"
    from benchmarks import device_run

    return device_run.main(__doc__ or "")


if __name__ == "__main__":
    sys.exit(main())
