"""``python -m mpistrat``: the command line."""

from mpistrat.cli import main

if __name__ == "__main__":
    main()
