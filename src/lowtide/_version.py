"""The version of the package, and the only place that states it: the build reads it from here."""

__version__ = "0.1.0.dev0"
ARCHIVED = "$Format:%H$"  # the commit, in sources that ``git archive`` has written
