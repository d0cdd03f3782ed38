"""Depthdial: elastic-depth looped language models, one set of weights for every loop count."""

__version__ = "0.1.0"
