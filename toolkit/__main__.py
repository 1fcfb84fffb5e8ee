"""python -m toolkit: the `toolkit` command where it is not on the path."""

from toolkit.cli.main import main

if __name__ == "__main__":
    main()
