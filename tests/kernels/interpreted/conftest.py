"""Tests here run in Triton's interpreter, on CPU tensors."""

import pytest

from tests.kernels import forward


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    return forward.pyfunc_call(pyfuncitem, interpret=True)
