"""``python -m waterflow``."""

from waterflow.cli import main

if __name__ == "__main__":
    main()
