"""Memory of a model: counted, estimated for training, and measured."""
