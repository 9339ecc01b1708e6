"""Benchmarks: of any server over HTTP, of the engine, and of its kernels. All are commands too."""
