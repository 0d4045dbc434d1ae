"""What holds for every test: no network, threads that share the cores, and examples that can be repeated."""

import os
from pathlib import Path

# Read by the libraries when they are imported, and inherited by the ranks that tests start.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import settings

# Inductor may reuse code made for another vector width, which gives NaN (torch 2.13, without our ops too).
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    str(Path(__file__).parents[1] / "build" / f"inductor-{torch.backends.cpu.get_cpu_capability()}"),
)

# A loaded machine makes single examples slow; the timeout of pytest.ini_options is the one that counts.
settings.register_profile("woq", deadline=None)
settings.register_profile("ci", parent=settings.get_profile("woq"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "woq")
