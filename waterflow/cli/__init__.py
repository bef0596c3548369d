"""The ``waterflow`` command."""
