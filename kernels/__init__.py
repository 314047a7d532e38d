"""Triton kernels and, beside each, its plain PyTorch reference (imported as ``repro.kernels``)."""
