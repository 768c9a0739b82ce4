"""What a model takes in memory: loaded (``footprint``), planned for training (``training``), measured (``measuring``)."""
