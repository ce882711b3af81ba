"""Lowtide in other people's training loops: one file a library, imported only when it is asked for."""
