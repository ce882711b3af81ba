"""``python -m lowtide`` is the command ``lowtide``."""

from lowtide.app.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
