"""Gradient compression for `horovod.tensorflow`."""
