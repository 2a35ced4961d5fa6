"""The version of the package, written here once: pyproject.toml and ``lightning_4d.__version__`` read it."""

__version__ = "0.1.0"
