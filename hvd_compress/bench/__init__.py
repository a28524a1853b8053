"""Benchmarks: ``python -m hvd_compress.bench codecs``."""
