"""``python -m monet_like``: the command line."""

from .entry import main

if __name__ == "__main__":
    main()
