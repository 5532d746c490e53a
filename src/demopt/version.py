"""The version of demopt."""

__version__ = "0.3.0"
