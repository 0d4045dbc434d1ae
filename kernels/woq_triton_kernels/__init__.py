"""Triton kernels for weight-only quantized models, and the packed layout that they read.

Importing this package needs torch alone; the kernel modules import Triton themselves.
"""
