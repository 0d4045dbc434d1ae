"""Tests of the kernels without a GPU: their numbers in Triton's interpreter, their code compiled offline.

Triton decides when it is imported whether it interprets. Tests under ``interpreted`` and ``compiled``
need one way each, so a test runs in this process if Triton was imported its way, and else in a helper
process that `forward` keeps.
"""
