"""What holds for every test: no network, threads that share the cores, and examples that can be repeated."""

import os

# Read by the libraries when they are imported, and inherited by the ranks that tests start.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# A loaded machine makes single examples slow; the timeout of pytest.ini_options is the one that counts.
settings.register_profile("woq", deadline=None)
settings.register_profile("ci", parent=settings.get_profile("woq"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "woq")
