"""Plain float64 NumPy definitions of the codecs, written from the papers: what the kernels are tested against."""
