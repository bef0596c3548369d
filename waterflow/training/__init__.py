"""Train jobs side by side: from model and data to results and checkpoints."""
