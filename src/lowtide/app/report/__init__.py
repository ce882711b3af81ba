"""The report on training runs: read from their folders, shown as one HTML page, as Markdown or as JSON."""
