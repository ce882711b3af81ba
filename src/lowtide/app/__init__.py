"""The application around the library: models, data and training."""
