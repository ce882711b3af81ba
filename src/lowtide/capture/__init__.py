"""Notice every save, name it by module path, op and field, and know how much of it backward will read."""
