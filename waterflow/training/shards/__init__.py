"""A job whose batches are cut into shards, and trained on one device or on several."""
