"""Kernels for the CPU: C, compiled when the package is installed, and the calls of it."""
