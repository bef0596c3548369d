"""Each interpreter with the stand-in's environment begins with its operators."""

from tests.gpu import standin

standin.install()
