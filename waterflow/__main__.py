"""Run the command line as ``python -m waterflow``."""

from waterflow.cli.main import main

if __name__ == "__main__":
    main()
