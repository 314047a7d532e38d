"""``python -m repro``: the same as the ``repro`` command."""

from repro.cli import main

if __name__ == "__main__":
    main()
