"""The version of the package, and the only place that states it: the build reads it from here."""

__version__ = "0.1.0.dev0"
