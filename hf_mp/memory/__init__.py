"""What a model takes in memory: when loaded (``footprint``), trained (``training``), measured (``measuring``)."""
