"""Memory of a model: counted (``footprint``), estimated for training (``training``), and measured (``measuring``)."""
