"""The version of demopt."""

__version__ = "0.2.0"
