"""The version, in one place. It equals the one in pyproject.toml; a test compares them."""

__version__ = "0.1.0"
