"""The version of this package, which its own modules read here: ``hf_mp`` itself imports them."""

__version__ = "0.1.0"
